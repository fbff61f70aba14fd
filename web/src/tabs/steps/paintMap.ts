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
  type Tile,
} from './map'

/** Milliseconds of work before others have their turn. */
const SLICE = 8

type Picture = HTMLCanvasElement[] // of each head; one where a step is not by head

/** The images of all steps; null where they are no longer wanted. */
export async function pictures(
  { miniatures }: StepsMap,
  dark: boolean,
  signal: AbortSignal,
): Promise<Picture[] | null> {
  const ramps = {
    sequential: new Uint32Array(table('sequential', dark).buffer),
    diverging: new Uint32Array(table('diverging', dark).buffer),
  }
  const found: Picture[] = []
  let begun = performance.now()
  for (const { id, image } of miniatures) {
    if (performance.now() - begun > SLICE) {
      await new Promise((next) => setTimeout(next))
      begun = performance.now()
    }
    if (signal.aborted) return null
    const shares = id === 'weights' || id === 'shares'
    const ramp = shares ? ramps.sequential : ramps.diverging
    const [rows, columns] = image.shape.slice(-2)
    const count = image.shape.length === 3 ? image.shape[0] : 1
    found.push(
      Array.from({ length: count }, (_, head) =>
        imageOf(rows, columns, (pixels) => {
          const start = head * rows * columns
          for (let i = 0; i < pixels.length; i++) {
            const code = image.data[start + i]
            if (code) pixels[i] = ramp[shares ? Math.round(255 * ((code - 1) / 254) ** 0.6) : code]
          }
        }),
      ),
    )
  }
  return found
}

export interface Frame {
  map: StepsMap
  layout: Layout
  pictures: Picture[]
  moment: Moment
  /** The layer whose lines are shown while nothing is played, and the tile that is open or under the pointer. */
  layer: number
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
  for (const tile of layout.tiles) {
    pen.globalAlpha = tile.index < moment.tile ? 1 : tile.index > moment.tile ? 0.14 : 0.25 + 0.75 * moment.share
    paintTile(pen, tile, frame)
  }
  pen.globalAlpha = 1
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

function paintTile(pen: CanvasRenderingContext2D, tile: Tile, { map, pictures }: Frame): void {
  const heads = pictures[tile.index]
  heads?.forEach((picture, head) => {
    const box = headBox(tile, head, heads.length)
    pen.imageSmoothingEnabled = box.width < picture.width || box.height < picture.height
    pen.drawImage(picture, box.x, box.y, box.width, box.height)
    row(pen, box, map.token / map.tokens.length, 1 / map.tokens.length)
  })
  if (heads?.length === 1) outline(pen, tile, inks.line, 1)
}

/** The followed token's row. */
function row(pen: CanvasRenderingContext2D, box: Box, start: number, share: number): void {
  const height = Math.max(box.height * share, 1.5)
  const y = Math.min(box.y + box.height * start, box.y + box.height - height)
  pen.strokeStyle = inks.accent
  pen.lineWidth = 1
  pen.strokeRect(box.x - 0.5, y, box.width + 1, height)
}

function outline(pen: CanvasRenderingContext2D, { x, y, width, height }: Box, paint: string, thick = 2): void {
  pen.strokeStyle = paint
  pen.lineWidth = thick
  pen.strokeRect(x, y, width, height)
}

function ribbon(pen: CanvasRenderingContext2D, frame: Frame): void {
  const { map, layout, moment, next } = frame
  const { y, height } = layout.ribbon
  const count = map.tokens.length
  const middle = (i: number) => place(layout.ribbon, count, i)
  const layer = moment.layer ?? frame.layer
  const seen = moment.layer === null && !moment.over ? [] : looks(map, layer)
  pen.font = `13px ${inks.font}`
  const texts = new Map<number, string>()
  const text = (i: number) => texts.get(i) ?? texts.set(i, short(visible(map.tokens[i].text))).get(i)!
  const widths = new Map<number, number>()
  const wide = (i: number) => widths.get(i) ?? widths.set(i, pen.measureText(text(i)).width).get(i)!
  const shown = named(count, wide, 2 * middle(0), [map.token, count - 1, ...seen.map((one) => one.to)])
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
    pen.fillText(text(i), middle(i), y + height / 2)
  }
  pen.fillStyle = inks['ink-3']
  pen.font = `13px ${inks.font}`
  pen.fillText(moment.bars >= 1 && moment.drop === 0 ? short(next) : '…', middle(count), y + height / 2)
}

const short = (text: string): string => ([...text].length > 14 ? [...text].slice(0, 13).join('') + '…' : text)
