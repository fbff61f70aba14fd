// What the drawings share: a pen that is sharp on every screen, matrices as small images, cells walked by keys.

/** A pen for an empty canvas of so many CSS pixels. Its memory is made anew only when the size changes. */
export function penOf(canvas: HTMLCanvasElement, width: number, height: number): CanvasRenderingContext2D {
  const ratio = devicePixelRatio || 1
  const size = { width: Math.ceil(width * ratio), height: Math.ceil(height * ratio) }
  const pen = canvas.getContext('2d')!
  if (canvas.width === size.width && canvas.height === size.height) pen.reset()
  else Object.assign(canvas, size)
  canvas.style.width = `${width}px`
  canvas.style.height = `${height}px`
  pen.scale(ratio, ratio)
  return pen
}

/** Adds a line to the pen's path. */
export function addLine(pen: CanvasRenderingContext2D, x: number, y: number, toX: number, toY: number): void {
  pen.moveTo(x, y)
  pen.lineTo(toX, toY)
}

/** An image with a pixel for each cell: drawn larger without smoothing, 512 x 512 cells cost one drawImage. */
export function imageOf(rows: number, columns: number, fill: (pixels: Uint32Array) => void): HTMLCanvasElement {
  const found = new ImageData(columns, rows)
  fill(new Uint32Array(found.data.buffer))
  const canvas = Object.assign(document.createElement('canvas'), { width: columns, height: rows })
  canvas.getContext('2d')!.putImageData(found, 0, 0)
  return canvas
}

export interface Cell {
  row: number
  column: number
}
const WAYS: Record<string, [number, number]> = {
  ArrowUp: [-1, 0],
  ArrowDown: [1, 0],
  ArrowLeft: [0, -1],
  ArrowRight: [0, 1],
}

/** The cell that an arrow key leads to, from nowhere to `first`; null for other keys. */
export function walked(
  key: string,
  from: Cell | null,
  rows: number,
  columns: number,
  first: Cell = { row: 0, column: 0 },
): Cell | null {
  const way = WAYS[key]
  if (!way) return null
  if (!from) return first
  const inside = (x: number, end: number) => Math.min(Math.max(x, 0), end - 1)
  return { row: inside(from.row + way[0], rows), column: inside(from.column + way[1], columns) }
}
