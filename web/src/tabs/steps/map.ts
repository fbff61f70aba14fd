// The whole pass as one picture: where each step of each layer lies, and when it lights up while the pass is played.

import type { StepsMap } from '../../lib/api'

/** What a step is called where there is little room, and what it does, by its id; both for a model of any size. */
const STEPS: Record<string, [short: string, about: string]> = {
  embeddings: ['Embed', 'Each token is a row of a learned table.'],
  positions: ['Position', 'A vector for each place, added to the token’s.'],
  input: ['Input', 'What the layer reads: the residual stream.'],
  normed: ['Norm', 'Each row, brought to a common size.'],
  q: ['Query', 'What each token looks for.'],
  k: ['Key', 'What each token offers to those who look.'],
  v: ['Value', 'What each token gives when it is looked at.'],
  q_normed: ['Q norm', 'Queries, brought to a common size.'],
  k_normed: ['K norm', 'Keys, brought to a common size.'],
  q_turned: ['Q turned', 'Queries, turned by an angle that grows with the place.'],
  k_turned: ['K turned', 'Keys, turned by an angle that grows with the place.'],
  scores: ['Scores', 'How well each query (row) fits each key (column); a square for each head.'],
  scaled: ['Scaled', 'The scores, made smaller, so that the softmax does not choose only one.'],
  masked: ['Mask', 'What comes later may not be looked at: it is empty.'],
  weights: ['Softmax', 'The scores as shares that add up to 1: the attention of each head.'],
  concatenated: ['Heads', 'The values, mixed by the attention, all heads side by side.'],
  attention_out: ['Project', 'A learned matrix mixes what the heads have found.'],
  attention_after: ['Norm', 'What was found, brought to a common size.'],
  summed: ['Sum', 'What was found is added to what was there.'],
  residual: ['Add', 'What attention found is added to the residual stream.'],
  normed2: ['Norm', 'Again to a common size, before the second half of the layer.'],
  hidden: ['Up', 'Each token by itself goes through a small network: first to more numbers.'],
  gated: ['Gate', 'And to as many others, by a second matrix.'],
  activated: ['Bend', 'Without this bend, all layers would be one matrix.'],
  shares: ['Experts', 'A router chooses a few networks for each token.'],
  feedforward_out: ['Down', 'And back to the width of the residual stream.'],
  feedforward_after: ['Norm', 'What was thought, brought to a common size.'],
  summed2: ['Sum', 'What was thought is added to what was there.'],
  output: ['Add', 'What the network found is added: what the next layer reads.'],
  final: ['Norm', 'After the last layer, once more to a common size: its last row chooses the next token.'],
}
export const shortName = (id: string): string => STEPS[id]?.[0] ?? id
export const aboutStep = (id: string): string => STEPS[id]?.[1] ?? ''
/** Where something is added to the residual stream. */
export const ADDS = ['residual', 'output']

export interface Box {
  x: number
  y: number
  width: number
  height: number
}

export interface Tile extends Box {
  /** Its place among the map's miniatures, in the order of the pass. */
  index: number
  id: string
  layer: number | null
  /** Columns of squares, of a step that has one for each head. */
  across: number
}

export interface Layout {
  width: number
  height: number
  /** The tokens, and above them the lines between them. */
  ribbon: Box
  /** Where the names of the columns stand, each once. */
  names: { id: string; x: number; width: number }[]
  namesY: number
  tiles: Tile[]
  /** The residual stream of each layer: a line above its tiles. */
  lines: { layer: number; y: number; from: number; to: number }[]
}

const ARCS = 58 // pixels above the tokens
const RIBBON = 26
const NAMES = 20
const LEAST = 30 // of a column: on a narrow screen the map scrolls

/** Rows are layers, columns are steps; what comes before the first layer and after the last stands beside them. */
export function layout(map: Pick<StepsMap, 'miniatures' | 'n_heads'>, room: number): Layout {
  const inside = map.miniatures.filter((one) => one.layer !== null)
  const layers = 1 + Math.max(0, ...inside.map((one) => one.layer!))
  const before = map.miniatures.filter((one) => one.layer === null && one.id !== 'final').map((one) => one.id)
  const order = [...before, ...new Set(inside.map((one) => one.id)), 'final']
  const column = Math.max(LEAST, room / order.length)
  const width = column * order.length
  const gap = column > 40 ? 6 : 4
  const tall = Math.round(Math.min(Math.max(280 / layers - 16, 20), 72, column * 1.6))
  const pitch = tall + (layers > 6 ? 10 : 18)
  const top = ARCS + RIBBON + NAMES + 10
  const tiles = map.miniatures.map(({ id, layer, shape }, index) => ({
    index,
    id,
    layer,
    across: shape.length === 3 ? Math.ceil(Math.sqrt(shape[0])) : 1,
    x: order.indexOf(id) * column + gap / 2,
    y: top + pitch * (layer ?? (id === 'final' ? layers - 1 : 0)),
    width: column - gap,
    height: tall,
  }))
  return {
    width,
    height: top + pitch * (layers - 1) + tall + 8,
    ribbon: { x: 0, y: ARCS, width, height: RIBBON },
    names: order.map((id, i) => ({ id, x: i * column, width: column })),
    namesY: ARCS + RIBBON + NAMES / 2,
    tiles,
    lines: Array.from({ length: layers }, (_, layer) => ({
      layer,
      y: top + pitch * layer - 6,
      from: layer ? before.length * column : 0,
      to: layer === layers - 1 ? width : width - column,
    })),
  }
}

/** The part of a tile that is a head's; the whole of it where it is not by head. */
export function headBox(tile: Tile, head: number, heads: number): Box {
  if (tile.across === 1) return tile
  const down = Math.ceil(heads / tile.across)
  const [width, height] = [tile.width / tile.across, tile.height / down]
  return {
    x: tile.x + (head % tile.across) * width,
    y: tile.y + Math.floor(head / tile.across) * height,
    width: width - 1,
    height: height - 1,
  }
}

/** The middle of a token in the ribbon; after the last one there is room for the next. */
export function middle({ width }: Box, tokens: number, i: number): number {
  const last = Math.max(64, width / (tokens + 1))
  return i < tokens ? ((i + 0.5) * (width - last)) / tokens : width - last / 2
}

/** What lies at a point: a tile and the head in it, or a token. */
export function hit(
  { tiles, ribbon }: Layout,
  { x, y }: { x: number; y: number },
  heads: number,
  tokens: number,
): { tile: Tile; head: number | null } | { token: number } | null {
  const inside = (box: Box) => x >= box.x && x < box.x + box.width && y >= box.y && y < box.y + box.height
  if (y >= 0 && y < ribbon.y + ribbon.height && x >= 0 && x < ribbon.width)
    return { token: Math.min(Math.floor(x / (2 * middle(ribbon, tokens, 0))), tokens - 1) }
  const tile = tiles.find(inside)
  if (!tile) return null
  if (tile.across === 1) return { tile, head: null }
  const head = Array.from({ length: heads }, (_, h) => h).find((h) => inside(headBox(tile, h, heads)))
  return { tile, head: head ?? null }
}

/** The tile that an arrow key leads to from one: along its row, or to the same column of another layer. */
export function stepped(tiles: Tile[], from: number, key: string): number {
  const { layer, id } = tiles[from]
  if (key === 'ArrowLeft') return Math.max(0, from - 1)
  if (key === 'ArrowRight') return Math.min(tiles.length - 1, from + 1)
  const way = key === 'ArrowUp' ? -1 : key === 'ArrowDown' ? 1 : 0
  const found = tiles.findIndex((tile) => tile.id === id && tile.layer === (layer ?? 0) + way)
  return way && found >= 0 ? found : from
}

// --- playing --------------------------------------------------------------------------------------------------------
export const SECONDS = 20
const SLOW: Record<string, number> = { scores: 3, weights: 4 } // what there is most to see of
const [TOKENS, BARS, DROP] = [1.2, 2.2, 1.6] // seconds for the text, the bars and the token that drops

export interface Moment {
  /** The tile that lights up, and how far it has; -1 before the first, their number after the last. */
  tile: number
  share: number
  /** Of the lines from the query to the keys: how far they reach, and how much of the softmax they have. */
  fan: number
  swell: number
  /** The layer whose attention the lines are. */
  layer: number | null
  bars: number
  drop: number
  over: boolean
}

/** What is to be seen so many seconds after the start. */
export function moment(tiles: Tile[], seconds: number): Moment {
  const still = { tile: -1, share: 0, fan: 0, swell: 0, layer: null, bars: 0, drop: 0, over: false }
  if (seconds < TOKENS) return { ...still, share: seconds / TOKENS }
  const time = SECONDS - TOKENS - BARS - DROP
  const whole = tiles.reduce((sum, { id }) => sum + (SLOW[id] ?? 1), 0)
  let begin = TOKENS
  for (const [index, { id, layer }] of tiles.entries()) {
    const takes = (time * (SLOW[id] ?? 1)) / whole
    if (seconds < begin + takes) {
      const share = (seconds - begin) / takes
      const after = ['scaled', 'masked'].includes(id)
      const fan = id === 'scores' ? share : after || id === 'weights' || id === 'concatenated' ? 1 : 0
      const swell = id === 'weights' ? share : id === 'concatenated' ? 1 : 0
      return { ...still, tile: index, share, fan, swell, layer: fan ? layer : null }
    }
    begin += takes
  }
  const last = { ...still, tile: tiles.length, share: 1 }
  if (seconds < begin + BARS) return { ...last, bars: (seconds - begin) / BARS }
  return { ...last, bars: 1, drop: Math.min((seconds - begin - BARS) / DROP, 1), over: seconds >= SECONDS }
}

/** The same picture still: all is there. */
export const STILL: Moment = {
  tile: Infinity,
  share: 1,
  fan: 1,
  swell: 1,
  layer: null,
  bars: 1,
  drop: 0,
  over: true,
}

// --- the lines ------------------------------------------------------------------------------------------------------
export interface Look {
  head: number
  to: number
  weight: number
}

/** Whom a token attends to in a layer, with all heads or one, strongest first, and no more than can be told apart. */
export function looks(
  { attention }: Pick<StepsMap, 'attention'>,
  layer: number,
  only: number | null = null,
  most = 160,
): Look[] {
  const [, heads, tokens] = attention.shape
  const found: Look[] = []
  for (let head = 0; head < heads; head++) {
    if (only !== null && head !== only) continue
    const start = (layer * heads + head) * tokens
    for (let to = 0; to < tokens; to++) {
      const weight = attention.data[start + to] / 255
      if (weight > 0.015) found.push({ head, to, weight })
    }
  }
  return found.sort((a, b) => b.weight - a.weight).slice(0, most)
}

/** The tokens whose names are written, where not all fit: the followed one, and then those attended to most. */
export function named(count: number, width: (i: number) => number, each: number, first: number[]): Set<number> {
  const found = new Set<number>()
  const free = (i: number) => {
    for (const j of found) if (Math.abs(i - j) * each < (width(i) + width(j)) / 2 + 4) return false
    return true
  }
  const others = Array.from({ length: count }, (_, i) => i)
  for (const i of [...first, ...others]) {
    if (found.size > 60) break
    if (!found.has(i) && free(i)) found.add(i)
  }
  return found
}
