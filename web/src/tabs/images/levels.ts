// An image as rows of levels from 0 (paper) to 1 (ink), and as a short text for the address: a character per pixel.

import { addLine, penOf } from '../../lib/canvas'

export type Levels = number[][]

const DIGITS = '0123456789abcdefg' // 17 levels, as the digits that ship have
const TOP = DIGITS.length - 1

export const blank = (size: number): Levels => Array.from({ length: size }, () => new Array<number>(size).fill(0))

export const write = (image: Levels): string =>
  image
    .flat()
    .map((level) => DIGITS[Math.round(Math.min(Math.max(level, 0), 1) * TOP)])
    .join('')

/** The image of such a text; null where it is not one of this size. */
export function read(text: string, size: number): Levels | null {
  if (text.length !== size * size || [...text].some((letter) => !DIGITS.includes(letter))) return null
  return Array.from({ length: size }, (_, r) =>
    Array.from({ length: size }, (_, c) => DIGITS.indexOf(text[r * size + c]) / TOP),
  )
}

/** The same image in another size, each pixel the nearest one. */
export function resized(image: Levels, size: number): Levels {
  const [rows, columns] = [image.length, image[0].length]
  if (rows === size && columns === size) return image
  return Array.from({ length: size }, (_, r) =>
    Array.from(
      { length: size },
      (_, c) => image[Math.floor(((r + 0.5) * rows) / size)][Math.floor(((c + 0.5) * columns) / size)],
    ),
  )
}

/** A touch of the brush at a point, in pixels from the corner: full in the middle, soft at the edge. */
export function touched(image: Levels, x: number, y: number, erase: boolean): Levels {
  const wide = Math.max(1, image.length / 8) // as wide on a finer grid
  return image.map((row, r) =>
    row.map((level, c) => {
      const force = Math.round(Math.min(Math.max(1.3 - Math.hypot(c + 0.5 - x, r + 0.5 - y) / wide, 0), 1) * TOP) / TOP
      return erase ? Math.min(level, 1 - force) : Math.max(level, force)
    }),
  )
}

export const isBlank = (image: Levels): boolean => image.every((row) => row.every((level) => level === 0))

/** Paint levels on a canvas of so many CSS pixels a side. Pixels that are not known yet (NaN) stay empty. */
export function paint(
  canvas: HTMLCanvasElement,
  image: Levels,
  side: number,
  paper: string,
  ink: string,
  line: string,
): CanvasRenderingContext2D {
  const pen = penOf(canvas, side, side)
  const cell = side / image.length
  image.forEach((row, r) =>
    row.forEach((level, c) => {
      if (Number.isNaN(level)) return
      const box = [c * cell, r * cell, cell + 0.5, cell + 0.5] as const // no seams between
      pen.fillStyle = paper
      pen.fillRect(...box)
      pen.globalAlpha = level
      pen.fillStyle = ink
      pen.fillRect(...box)
      pen.globalAlpha = 1
    }),
  )
  if (cell >= 12) {
    pen.strokeStyle = line
    pen.lineWidth = 1
    pen.beginPath()
    for (let i = 1; i < image.length; i++) {
      addLine(pen, i * cell, 0, i * cell, side)
      addLine(pen, 0, i * cell, side, i * cell)
    }
    pen.stroke()
  }
  return pen
}
