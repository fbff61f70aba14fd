// Lines on a canvas, and the same as an SVG for those who want to print them. Where there are thousands, those of a
// head and of about the same weight are one path of hairlines, which costs a tenth of wider ones; the strongest stay
// wide.

import type { Lines } from './lines'

export interface Geometry {
  /** Where lines begin and end. */
  left: number
  right: number
  row: number
  /** By head, how far beside the middle of a token its lines leave, so that each can be followed. */
  shifts: number[]
}

const LEVELS = 12
const NAMESPACE = 'http://www.w3.org/2000/svg'

/** How much of the colour a weight has. */
export const alpha = (weight: number): number => Math.min(weight, 1) ** 0.7
const thickness = (weight: number): number => 0.9 + 2.1 * Math.min(weight, 1)

/** The shifts of the heads that are drawn, of `count`. */
export function shiftsOf(drawn: number[], count: number, row: number): number[] {
  const found: number[] = new Array(count).fill(0)
  const spread = Math.min(row * 0.5, 2.5 * (drawn.length - 1))
  if (drawn.length > 1) drawn.forEach((head, i) => (found[head] = (i / (drawn.length - 1) - 0.5) * spread))
  return found
}

interface Path {
  moveTo(x: number, y: number): void
  bezierCurveTo(a: number, b: number, c: number, d: number, e: number, f: number): void
}

function trace(path: Path, lines: Lines, i: number, geometry: Geometry): void {
  const { left, right, row } = geometry
  const [bend, move] = [(right - left) * 0.5, geometry.shifts[lines.head[i]]]
  const [a, b] = [(lines.from[i] + 0.5) * row + move, (lines.to[i] + 0.5) * row + move]
  path.moveTo(left, a)
  path.bezierCurveTo(left + bend, a, right - bend, b, right, b)
}

/** One path for each head and level, the weakest first. */
function bundles<P extends Path>(
  lines: Lines,
  geometry: Geometry,
  make: () => P,
): { head: number; weight: number; path: P }[] {
  const found = new Map<number, { head: number; weight: number; path: P }>()
  for (let i = 0; i < lines.count; i++) {
    const [head, weight] = [lines.head[i], lines.weight[i]]
    const level = Math.min(LEVELS - 1, Math.floor(alpha(weight) * LEVELS))
    const key = level * 65536 + head
    let bundle = found.get(key)
    if (!bundle) found.set(key, (bundle = { head, weight: ((level + 0.5) / LEVELS) ** (1 / 0.7), path: make() }))
    trace(bundle.path, lines, i, geometry)
  }
  return [...found.entries()].sort(([a], [b]) => a - b).map(([, bundle]) => bundle)
}

const CROWD = 1200 // lines; more are hairlines but for the strongest
const STRONG = 0.3

export function drawLines(
  pen: CanvasRenderingContext2D,
  lines: Lines,
  geometry: Geometry,
  colours: string[],
  alone = false,
): void {
  // Without others around, faint ones may be seen.
  const opacity = (weight: number) => (alone ? alpha(weight) ** 0.6 : alpha(weight))
  let first = 0 // that is drawn by itself: lines come by weight
  if (lines.count > CROWD) {
    while (first < lines.count && lines.weight[first] < STRONG) first++
    pen.lineWidth = 1 / (devicePixelRatio || 1)
    for (const { head, weight, path } of bundles({ ...lines, count: first }, geometry, () => new Path2D())) {
      pen.strokeStyle = colours[head]
      pen.globalAlpha = Math.min(1, opacity(weight) * 1.15)
      pen.stroke(path)
    }
  }
  for (let i = first; i < lines.count; i++) {
    pen.strokeStyle = colours[lines.head[i]]
    pen.globalAlpha = opacity(lines.weight[i])
    pen.lineWidth = thickness(lines.weight[i])
    pen.beginPath()
    trace(pen, lines, i, geometry)
    pen.stroke()
  }
  pen.globalAlpha = 1
}

class Text implements Path {
  d = ''
  moveTo = (x: number, y: number): void => void (this.d += `M${round(x)} ${round(y)}`)
  bezierCurveTo = (...points: number[]): void => void (this.d += `C${points.map(round).join(' ')}`)
}
const round = (x: number): number => Math.round(10 * x) / 10

export interface Words {
  text: string
  x: number
  y: number
  end?: boolean
  faint?: boolean
}

/** The drawing as an <svg>, in the document for as long as it takes to save it. */
export function svgOf(
  size: { width: number; height: number },
  lines: Lines,
  geometry: Geometry,
  colours: string[],
  words: Words[],
  look: { ink: string; faint: string; font: string },
): SVGSVGElement {
  const make = (name: string, attributes: Record<string, string | number>): SVGElement => {
    const found = document.createElementNS(NAMESPACE, name)
    for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, String(value))
    return found
  }
  const svg = make('svg', {
    ...size,
    viewBox: `0 0 ${size.width} ${size.height}`,
    'font-family': look.font,
    'font-size': 14,
  }) as SVGSVGElement
  for (const { head, weight, path } of bundles(lines, geometry, () => new Text())) {
    svg.append(
      make('path', {
        d: path.d,
        fill: 'none',
        stroke: plain(colours[head]),
        'stroke-opacity': round(alpha(weight) * 100) / 100,
        'stroke-width': round(thickness(weight)),
      }),
    )
  }
  for (const { text, x, y, end, faint } of words) {
    const word = make('text', {
      x,
      y,
      fill: faint ? look.faint : look.ink,
      'text-anchor': end ? 'end' : 'start',
      'dominant-baseline': 'central',
    })
    word.textContent = text
    svg.append(word)
  }
  Object.assign(svg.style, { position: 'fixed', left: '-99999px', top: '0' })
  document.body.append(svg)
  setTimeout(() => svg.remove())
  return svg
}

const known = new Map<string, [number, number, number]>()
/** The red, green and blue of any CSS colour: of those, too, that drawing programs do not know yet. */
export function rgb(colour: string): [number, number, number] {
  let found = known.get(colour)
  if (!found) {
    const canvas = document.createElement('canvas')
    canvas.width = canvas.height = 1
    const pen = canvas.getContext('2d')!
    pen.fillStyle = colour
    pen.fillRect(0, 0, 1, 1)
    const [r, g, b] = pen.getImageData(0, 0, 1, 1).data
    known.set(colour, (found = [r, g, b]))
  }
  return found
}
const plain = (colour: string): string => `rgb(${rgb(colour).join(',')})`
