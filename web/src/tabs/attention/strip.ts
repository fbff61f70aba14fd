// Vectors as strips of coloured cells.

import { tint } from '../../lib/colours'

export const largest = (values: ArrayLike<number>): number => {
  let most = 0
  for (let i = 0; i < values.length; i++) most = Math.max(most, Math.abs(values[i]))
  return most || 1
}

/** Cells side by side, blue below zero and orange above, `most` at full strength. */
export function drawStrip(
  pen: CanvasRenderingContext2D,
  values: ArrayLike<number>,
  most: number,
  dark: boolean,
  box: { x: number; y: number; width: number; height: number },
): void {
  const each = box.width / values.length
  for (let i = 0; i < values.length; i++) {
    pen.fillStyle = tint(lifted(values[i] / most), dark, 'diverging')
    pen.fillRect(box.x + i * each, box.y, each > 3 ? each - 0.5 : each + 0.3, box.height)
  }
}

/** Small values are lifted a little, so that they can be told from nothing. */
const lifted = (t: number): number => Math.sign(t) * Math.abs(t) ** 0.75
