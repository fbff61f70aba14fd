// Paints the map of a pass: small images made in slices, so that the page stays responsive, and a frame of it.

import type { StepsMap } from '../../lib/api'
import { addLine, imageOf } from '../../lib/canvas'
import { hue, table } from '../../lib/colours'
import { visible } from '../../lib/format'
import { colour } from '../../lib/theme.svelte'
import {
  ADDS,
  headBox,
  looks,
  middle as place,
  named,
  shortName,
  type Box,
  type Layout,
  type Moment,
  type Look,
} from './map'

/** Milliseconds of work before others have their turn. */
const SLICE = 8

/** All tiles on one canvas, so that a frame is a few copies of parts of it; null where it is no longer wanted. */
export async function plateOf(
  map: StepsMap,
  layout: Layout,
  dark: boolean,
  signal: AbortSignal,
): Promise<HTMLCanvasElement | null> {
  const ramps = {
    sequential: new Uint32Array(table('sequential', dark).buffer),
    diverging: new Uint32Array(table('diverging', dark).buffer),
  }
  const ratio = devicePixelRatio || 1
  const plate = document.createElement('canvas')
  Object.assign(plate, { width: Math.ceil(layout.width * ratio), height: Math.ceil(layout.height * ratio) })
  const pen = plate.getContext('2d')!
  pen.scale(ratio, ratio)
  const [accent, line] = [colour('accent'), colour('line')]
  let begun = performance.now()
  for (const tile of layout.tiles) {
    if (performance.now() - begun > SLICE) {
      await new Promise((next) => setTimeout(next))
      begun = performance.now()
    }
    if (signal.aborted) return null
    const { id, image } = map.miniatures[tile.index]
    const shares = id === 'weights' || id === 'shares'
    const ramp = shares ? ramps.sequential : ramps.diverging
    const [rows, columns] = image.shape.slice(-2)
    const heads = image.shape.length === 3 ? image.shape[0] : 1
    for (let head = 0; head < heads; head++) {
      const picture = imageOf(rows, columns, (pixels) => {
        const start = head * rows * columns
        for (let i = 0; i < pixels.length; i++) {
          const code = image.data[start + i]
          if (code) pixels[i] = ramp[shares ? Math.round(255 * ((code - 1) / 254) ** 0.6) : code]
        }
      })
      const box = headBox(tile, head, heads)
      pen.imageSmoothingEnabled = box.width < columns || box.height < rows
      pen.drawImage(picture, box.x, box.y, box.width, box.height)
      row(pen, box, map.token / map.tokens.length, 1 / map.tokens.length, accent)
    }
    if (heads === 1) outline(pen, tile, line, 1)
  }
  return plate
}

export interface Frame {
  map: StepsMap
  layout: Layout
  plate: HTMLCanvasElement
  moment: Moment
  /** The layer and the head (null: all) whose lines are shown while nothing is played; the tile that is open, or under
      the pointer. */
  layer: number
  head: number | null
  open: number
  over: number | null
  /** What stands after the tokens: the one that is chosen. */
  next: string
  dark: boolean
}

const INKS = ['accent', 'ink', 'ink-3', 'line', 'line-strong', 'paper', 'font'] as const
type Inks = Record<(typeof INKS)[number], string>
let inks: Inks // of the frame that is painted: asking for them is slow

export function paint(pen: CanvasRenderingContext2D, frame: Frame): void {
  const { layout, moment } = frame
  inks = Object.fromEntries(INKS.map((name) => [name, colour(name)])) as Inks
  pen.font = `11px ${inks.font}`
  pen.textBaseline = 'middle'
  pen.textAlign = 'center'
  names(pen, layout)
  stream(pen, frame)
  tiles(pen, frame)
  for (const [index, ink] of [
    [frame.over, 'ink'],
    [moment.over ? frame.open : moment.tile, 'accent'],
  ] as const) {
    const tile = index === null ? undefined : layout.tiles[index]
    if (tile) outline(pen, tile, inks[ink])
  }
  ribbon(pen, frame)
}

function names(pen: CanvasRenderingContext2D, { names, namesY }: Layout): void {
  pen.fillStyle = inks['ink-3']
  for (const { id, x, width } of names) {
    const text = shortName(id)
    const room = width - 2
    const wide = pen.measureText(text).width
    pen.save()
    pen.translate(x + width / 2, namesY)
    if (wide > room) pen.scale(Math.max(room / wide, 0.72), 1)
    pen.fillText(text, 0, 0)
    pen.restore()
  }
}

/** The residual stream: as thick as the followed token's vector is long, among all layers. */
function stream(pen: CanvasRenderingContext2D, { map, layout, moment }: Frame): void {
  const most = Math.max(...map.stream.data, 1e-9)
  const at = layout.tiles[Math.min(Math.max(moment.tile, 0), layout.tiles.length - 1)]
  const reached = moment.tile < 0 ? -1 : moment.tile >= layout.tiles.length ? Infinity : (at.layer ?? 0)
  for (const { layer, y, from, to } of layout.lines) {
    const done = layer < reached || reached === Infinity
    const end = done ? to : layer === reached && at ? at.x + at.width * moment.share : from
    pen.strokeStyle = inks.line
    pen.lineWidth = 2
    pen.beginPath()
    addLine(pen, from, y, to, y)
    if (layer) {
      pen.moveTo(layout.lines[layer - 1].to, layout.lines[layer - 1].y)
      pen.lineTo(layout.lines[layer - 1].to, y - 8)
      pen.lineTo(from, y - 8)
      pen.lineTo(from, y)
    }
    pen.stroke()
    if (end <= from) continue
    pen.strokeStyle = inks.accent
    pen.lineWidth = 1.5 + 4 * (map.stream.data[layer + 1] / most)
    pen.beginPath()
    addLine(pen, from, y, end, y)
    pen.stroke()
    for (const tile of layout.tiles)
      if (tile.layer === layer && ADDS.includes(tile.id) && tile.x < end) plus(pen, tile.x + tile.width / 2, y)
  }
}

function plus(pen: CanvasRenderingContext2D, x: number, y: number): void {
  pen.fillStyle = inks.paper
  pen.strokeStyle = inks.accent
  pen.lineWidth = 1.5
  pen.beginPath()
  pen.arc(x, y, 4.5, 0, 7)
  pen.fill()
  pen.stroke()
  pen.beginPath()
  addLine(pen, x - 3, y, x + 3, y)
  addLine(pen, x, y - 3, x, y + 3)
  pen.stroke()
}

/** What was computed so far is there, what comes is faint: parts of the plate. */
function tiles(pen: CanvasRenderingContext2D, { layout, plate, moment }: Frame): void {
  const ratio = plate.width / layout.width
  const part = (x: number, y: number, width: number, height: number) => {
    if (width > 0 && height > 0)
      pen.drawImage(plate, x * ratio, y * ratio, width * ratio, height * ratio, x, y, width, height)
  }
  const tile = layout.tiles[Math.max(moment.tile, 0)]
  if (!tile) return part(0, 0, layout.width, layout.height)
  const [top, left] = [tile.y - 2, moment.tile < 0 ? 0 : tile.x]
  part(0, 0, layout.width, top)
  part(0, top, left, tile.height + 4)
  pen.globalAlpha = 0.14
  part(left + tile.width, top, layout.width - left - tile.width, tile.height + 4)
  part(0, top + tile.height + 4, layout.width, layout.height - top - tile.height - 4)
  pen.globalAlpha = moment.tile < 0 ? 0.14 : 0.25 + 0.75 * moment.share
  part(left, top, tile.width, tile.height + 4)
  pen.globalAlpha = 1
}

/** The followed token's row. */
function row(pen: CanvasRenderingContext2D, box: Box, start: number, share: number, paint: string): void {
  const height = Math.max(box.height * share, 1.5)
  const y = Math.min(box.y + box.height * start, box.y + box.height - height)
  pen.strokeStyle = paint
  pen.lineWidth = 1
  pen.strokeRect(box.x - 0.5, y, box.width + 1, height)
}

function outline(pen: CanvasRenderingContext2D, { x, y, width, height }: Box, paint: string, thick = 2): void {
  pen.strokeStyle = paint
  pen.lineWidth = thick
  pen.strokeRect(x, y, width, height)
}

interface Words {
  layer: number
  head: number | null
  each: number
  texts: string[]
  seen: Look[]
  shown: Set<number>
}
const known = new WeakMap<StepsMap, Words>() // so that it is not found out again for every frame

/** The tokens as they are written, whom one of them attends to, and which have room for their names. */
function wordsOf(
  pen: CanvasRenderingContext2D,
  map: StepsMap,
  layer: number,
  head: number | null,
  each: number,
): Words {
  const before = known.get(map)
  if (before?.layer === layer && before.head === head && before.each === each) return before
  const texts = before?.texts ?? map.tokens.map((token) => short(visible(token.text)))
  const seen = looks(map, layer, head)
  const first = [map.token, texts.length - 1, ...seen.map((one) => one.to)]
  const shown = named(texts.length, (i) => pen.measureText(texts[i]).width, each, first)
  const found = { layer, head, each, texts, seen, shown }
  known.set(map, found)
  return found
}

function ribbon(pen: CanvasRenderingContext2D, frame: Frame): void {
  const { map, layout, moment, next } = frame
  const { y, height } = layout.ribbon
  const count = map.tokens.length
  const middle = (i: number) => place(layout.ribbon, count, i)
  const layer = moment.layer ?? frame.layer
  const alone = moment.layer === null ? frame.head : null
  pen.font = `13px ${inks.font}`
  const { texts, shown, ...attended } = wordsOf(pen, map, layer, alone, 2 * middle(0))
  const seen = moment.layer === null && !moment.over ? [] : attended.seen
  pen.lineCap = 'round'
  for (const { head, to, weight } of seen) {
    const [from, end] = [middle(map.token), middle(to)]
    const reach = from + (end - from) * moment.fan
    const rise = Math.min(16 + Math.abs(from - end) * 0.14, y - 6)
    pen.strokeStyle = map.n_heads > 1 ? hue(head, map.n_heads, frame.dark) : inks.accent
    pen.globalAlpha = 0.25 + 0.65 * weight * moment.swell
    pen.lineWidth = 0.8 + 7 * weight * moment.swell
    pen.beginPath()
    if (to === map.token) pen.arc(from, y - 7, 5, 0, 7 * moment.fan)
    else {
      pen.moveTo(from, y)
      pen.quadraticCurveTo((from + reach) / 2, y - 2 * rise * moment.fan, reach, y - (1 - moment.fan) * rise * 0.3)
    }
    pen.stroke()
  }
  pen.globalAlpha = 1
  for (let i = 0; i < count; i++) {
    const lit = moment.tile >= 0 || i <= moment.share * count
    if (!shown.has(i)) {
      pen.fillStyle = inks['line-strong']
      pen.fillRect(middle(i) - 0.5, y + height - 3, 1, 3)
      continue
    }
    const followed = i === map.token
    pen.fillStyle = inks[followed ? 'accent' : lit ? 'ink' : 'ink-3']
    pen.font = `${followed ? '600 ' : ''}13px ${inks.font}`
    pen.fillText(texts[i], middle(i), y + height / 2)
  }
  pen.fillStyle = inks['ink-3']
  pen.font = `13px ${inks.font}`
  pen.fillText(moment.bars >= 1 && moment.drop === 0 ? short(next) : '…', middle(count), y + height / 2)
}

const short = (text: string): string => ([...text].length > 14 ? [...text].slice(0, 13).join('') + '…' : text)
