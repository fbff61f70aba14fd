// Saving what is drawn. An <svg> is copied with its computed styles; anything else (chips, bars, canvases) is redrawn
// as an SVG of plain rectangles, texts and images, which every program opens.

import type { Row } from './csv'
import { colour } from './theme.svelte'

export interface Saved {
  /** The file's name, without its end. */
  name: string
  /** What is drawn: an <svg>, a <canvas> or any element around them. */
  picture?: () => Element | null | undefined
  /** The numbers. */
  rows?: () => Row[] | Promise<Row[]>
  /** What stands below a picture: what it shows, line by line. */
  caption?: () => string[]
  /** What the colours of a picture mean. */
  legend?: () => { colour: string; label: string }[]
  /** What is written. */
  text?: () => string
}

const NAMESPACE = 'http://www.w3.org/2000/svg'
const STYLES = [
  'fill',
  'fill-opacity',
  'stroke',
  'stroke-width',
  'stroke-opacity',
  'stroke-dasharray',
  'stroke-linecap',
  'stroke-linejoin',
  'opacity',
  'font-family',
  'font-size',
  'font-weight',
  'font-style',
  'text-anchor',
  'dominant-baseline',
  'letter-spacing',
  'paint-order',
  'visibility',
  'display',
]

export function download(name: string, type: string, content: string | Blob): void {
  const link = document.createElement('a')
  link.href = URL.createObjectURL(
    content instanceof Blob ? content : new Blob([content], { type: `${type};charset=utf-8` }),
  )
  link.download = name
  link.click()
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000)
}

export function saveSvg(saved: Saved): void {
  download(`${saved.name}.svg`, 'image/svg+xml', svgText(saved).text)
}

export async function savePng(saved: Saved): Promise<void> {
  const { text, width, height } = svgText(saved)
  const address = URL.createObjectURL(new Blob([text], { type: 'image/svg+xml' }))
  try {
    const image = new Image()
    image.src = address
    await image.decode()
    const scale = Math.max(2, devicePixelRatio)
    const canvas = document.createElement('canvas')
    Object.assign(canvas, { width: Math.ceil(width * scale), height: Math.ceil(height * scale) })
    canvas.getContext('2d')!.drawImage(image, 0, 0, canvas.width, canvas.height)
    const blob = await new Promise<Blob | null>((done) => canvas.toBlob(done, 'image/png'))
    if (!blob) throw new Error('The picture is too large to be saved as PNG; SVG has no limit.')
    download(`${saved.name}.png`, 'image/png', blob)
  } finally {
    URL.revokeObjectURL(address)
  }
}

/** A picture as the text of an SVG file of its own, on the page's paper, with its caption and legend below. */
export function svgText({ picture, caption, legend }: Saved): { text: string; width: number; height: number } {
  const element = picture?.()
  if (!element) throw new Error('There is nothing to save yet.')
  const box = element.getBoundingClientRect()
  const margin = 16
  const drawn = Math.ceil(element.scrollHeight || box.height) + 2 * margin
  const width = Math.max(Math.ceil(element.scrollWidth || box.width) + 2 * margin, LEAST)
  const below = words(caption?.() ?? [], legend?.() ?? [], width - 2 * margin)
  const height = drawn + below.height
  const root = make('svg', { xmlns: NAMESPACE, width, height, viewBox: `0 0 ${width} ${height}` })
  root.append(make('rect', { width, height, fill: colour('paper') }))
  const group = make('g', { transform: `translate(${margin} ${margin})` })
  root.append(group)
  draw(element, group, box)
  below.group.setAttribute('transform', `translate(${margin} ${drawn})`)
  root.append(below.group)
  return { text: new XMLSerializer().serializeToString(root), width, height }
}

const LEAST = 320 // a picture's width, so that its caption can be read
const [SIZE, LINE] = [13, 20] // of the caption's letters and lines

/** The legend in rows of swatches, then the caption, each line broken where it is too long. */
function words(
  caption: string[],
  legend: { colour: string; label: string }[],
  room: number,
): { group: SVGElement; height: number } {
  const group = make('g', { 'font-family': getComputedStyle(document.body).fontFamily, 'font-size': SIZE })
  const pen = document.createElement('canvas').getContext('2d')!
  pen.font = `${SIZE}px ${getComputedStyle(document.body).fontFamily}`
  const wide = (text: string): number => pen.measureText(text).width
  const middle = { 'dominant-baseline': 'central', fill: colour('ink') }
  let [x, y] = [0, 0]
  for (const { colour: fill, label } of legend) {
    const size = SIZE + 6 + wide(label)
    if (x && x + size > room) [x, y] = [0, y + LINE]
    group.append(
      make('rect', { x, y: y - SIZE / 2, width: SIZE, height: SIZE, rx: 3, fill, stroke: colour('line-strong') }),
    )
    const text = group.appendChild(make('text', { x: x + SIZE + 6, y, ...middle }))
    text.textContent = label
    x += size + 18
  }
  if (legend.length) y += LINE
  for (const whole of caption) {
    let line = ''
    const write = (): void => {
      group.appendChild(make('text', { x: 0, y, ...middle })).textContent = line
      y += LINE
    }
    for (const word of whole.split(/\s+/).filter(Boolean)) {
      if (line && wide(`${line} ${word}`) > room) {
        write()
        line = word
      } else line = line ? `${line} ${word}` : word
    }
    if (line) write()
  }
  return { group, height: y }
}

function make(name: string, attributes: Record<string, string | number>): SVGElement {
  const found = document.createElementNS(NAMESPACE, name)
  for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, String(value))
  return found
}

function draw(element: Element, into: SVGElement, origin: DOMRect): void {
  const style = getComputedStyle(element)
  if (style.display === 'none' || style.visibility === 'hidden' || element.matches('.unseen, .button')) return
  const box = element.getBoundingClientRect()
  const [x, y] = [box.left - origin.left, box.top - origin.top]
  if (element instanceof SVGSVGElement) {
    const copy = inlined(element)
    for (const [key, value] of Object.entries({ x, y, width: box.width, height: box.height, overflow: 'visible' }))
      copy.setAttribute(key, String(value))
    return into.append(copy)
  }
  if (element instanceof HTMLCanvasElement) {
    return into.append(
      make('image', {
        x,
        y,
        width: box.width,
        height: box.height,
        href: element.toDataURL('image/png'),
        opacity: style.opacity,
      }),
    )
  }
  const group = style.opacity === '1' ? into : into.appendChild(make('g', { opacity: style.opacity }))
  // What stands in a line may go on in the next one.
  for (const part of style.display === 'inline' ? element.getClientRects() : [box])
    surface(style, part, part.left - origin.left, part.top - origin.top, group)
  if (
    element instanceof HTMLTextAreaElement ||
    element instanceof HTMLInputElement ||
    element instanceof HTMLSelectElement
  )
    return
  for (const child of element.childNodes) {
    if (child instanceof Element) draw(child, group, origin)
    else if (child instanceof Text) write(child, style, group, origin)
  }
}

const COLOUR = /(?:rgba?|color|oklab|oklch)\([^)]*\)|#[0-9a-f]+/gi

/** The background, which may be a gradient from left to right, and the borders of an element. */
function surface(style: CSSStyleDeclaration, box: DOMRect, x: number, y: number, into: SVGElement): void {
  const clear = (colour: string) => colour === 'transparent' || /[,/] ?0\)$/.test(colour)
  const shape = { x, y, width: box.width, height: box.height, rx: parseFloat(style.borderTopLeftRadius) || 0 }
  const stops = /^linear-gradient\((?:to right|90deg), (.*)\)$/.exec(style.backgroundImage)?.[1].match(COLOUR)
  if (stops && box.width) {
    const id = `gradient-${Math.round(x)}-${Math.round(y)}`
    const gradient = into.appendChild(make('linearGradient', { id }))
    stops.forEach((fill, i) =>
      gradient.append(make('stop', { offset: i / Math.max(stops.length - 1, 1), 'stop-color': fill })),
    )
    into.append(make('rect', { ...shape, fill: `url(#${id})` }))
  }
  if (!clear(style.backgroundColor) && box.width && box.height)
    into.append(make('rect', { ...shape, fill: style.backgroundColor }))
  if (parseFloat(style.borderTopWidth) && parseFloat(style.borderLeftWidth) && !clear(style.borderTopColor))
    into.append(make('rect', { ...shape, fill: 'none', stroke: style.borderTopColor }))
  else if (parseFloat(style.borderTopWidth) && !clear(style.borderTopColor))
    into.append(
      make('rect', {
        x,
        y,
        width: box.width,
        height: style.borderTopWidth.replace('px', ''),
        fill: style.borderTopColor,
      }),
    )
  else if (parseFloat(style.borderBottomWidth) && !clear(style.borderBottomColor)) {
    into.append(make('rect', { x, y: y + box.height - 1, width: box.width, height: 1, fill: style.borderBottomColor }))
  }
}

/** A text node, line by line as it was broken. */
function write(node: Text, style: CSSStyleDeclaration, into: SVGElement, origin: DOMRect): void {
  const text = node.data
  if (!text.trim()) return
  const range = document.createRange()
  const lines: { text: string; box: DOMRect }[] = []
  const whole = node.length > 0 && (range.selectNodeContents(node), range.getClientRects().length <= 1)
  // Where a line may be broken, spaces and line ends in the source count as one space.
  const said = (piece: string): string => (style.whiteSpace.startsWith('pre') ? piece : piece.replace(/\s+/g, ' '))
  const pieces = whole ? [text] : text.split(/(?<=\s)/)
  let at = 0
  for (const piece of pieces) {
    range.setStart(node, at)
    range.setEnd(node, (at += piece.length))
    const box = range.getBoundingClientRect()
    const last = lines.at(-1)
    if (last && Math.abs(last.box.top - box.top) < 2) last.text += said(piece)
    else if (box.width) lines.push({ text: said(piece), box })
  }
  for (const line of lines) {
    const shown = make('text', {
      x: line.box.left - origin.left,
      y: line.box.top - origin.top + line.box.height / 2,
      'dominant-baseline': 'central',
      fill: style.color,
      'font-family': style.fontFamily,
      'font-size': style.fontSize,
      'font-weight': style.fontWeight,
      'xml:space': 'preserve',
    })
    shown.textContent = line.text.trimEnd()
    into.append(shown)
  }
}

/** A copy of an <svg> that needs no stylesheet. */
function inlined(svg: SVGSVGElement): SVGSVGElement {
  const copy = svg.cloneNode(true) as SVGSVGElement
  const [from, to] = [
    [svg, ...svg.querySelectorAll('*')],
    [copy, ...copy.querySelectorAll('*')],
  ]
  from.forEach((element, i) => {
    const style = getComputedStyle(element)
    for (const name of STYLES) {
      const value = style.getPropertyValue(name)
      if (value) to[i].setAttribute(name, value)
    }
    to[i].removeAttribute('class')
    to[i].removeAttribute('style')
  })
  return copy
}
