// Which lines are drawn between two columns of tokens. A layer of 12 heads over 512 tokens has three million weights:
// those that end in what is on the screen are looked through, and no more than a budget of the strongest is drawn.

import type { Numbers } from '../../lib/arrays'

export type Side = 'from' | 'to'

/** What may be seen: heads that are on, and the tokens that are shown, by their places in the model's row. */
export interface Scene {
  weights: Numbers // (heads, from, to)
  heads: number[]
  from: number[]
  to: number[]
  /** For each head and row, the smallest weight that is drawn; null: all are. */
  floors: Float32Array | null
}

/** Lines by their weight, the weakest first: `from` and `to` are places among the shown tokens. */
export interface Lines {
  count: number
  head: Uint16Array
  from: Uint16Array
  to: Uint16Array
  weight: Float32Array
  /** Whether the budget left some out. */
  cut: boolean
}

export interface Window {
  first: number
  end: number
}

const FAINTEST = 0.001 // what no eye would see
const BINS = 1024

/** For each head and row the smallest of its largest weights that together make `share` of the row. */
export function floorsOf({ shape, data }: Numbers, share: number): Float32Array | null {
  if (share >= 1) return null
  const [heads, from, to] = shape
  // Of numbers that are not negative, the bits are in the same order: the first of them are bins, with 16 for each
  // doubling. Only the bin in which the share is reached must be sorted.
  const bits = new Uint32Array(data.buffer, data.byteOffset, data.length)
  const sums = new Float64Array(4096) // all 0 before each row
  const last = new Float32Array(to)
  const found = new Float32Array(heads * from)
  for (let i = 0; i < found.length; i++) {
    const [begin, end] = [i * to, (i + 1) * to]
    let [sum, at, lowest] = [0, 0, 4095]
    for (let k = begin; k < end; k++) {
      if (bits[k] === 0) continue
      const bin = bits[k] >>> 19
      sums[bin] += data[k]
      sum += data[k]
      if (bin > at) at = bin
      if (bin < lowest) lowest = bin
    }
    const highest = at
    let left = share * sum - 1e-6
    while (at > lowest && sums[at] < left) left -= sums[at--]
    sums.fill(0, lowest, highest + 1)
    let n = 0
    for (let k = begin; k < end; k++) if (bits[k] >>> 19 === at && bits[k]) last[n++] = data[k]
    if (n > 1) last.subarray(0, n).sort()
    found[i] = Infinity
    while (n > 0 && left > 0) left -= found[i] = last[--n]
  }
  return found
}

/** The strongest lines that end in the window, at most `budget`; `only` those of one token, on one side. */
export function strongest(
  scene: Scene,
  window: Window,
  budget: number,
  only: { side: Side; place: number } | null = null,
): Lines {
  const counts = new Uint32Array(BINS)
  each(scene, window, only, (_head, _from, _to, weight) => void counts[bin(weight)]++)
  let [lowest, total] = [BINS, 0]
  while (lowest > 0 && total < budget) total += counts[--lowest]
  const over = Math.max(0, total - budget) // of the weakest bin: where all weights are alike, only some are drawn
  const size = total - over
  const cut = over > 0 || counts.subarray(0, lowest).some((count) => count > 0)
  const starts = new Uint32Array(BINS + 1)
  for (let i = lowest; i < BINS; i++) starts[i + 1] = starts[i] + counts[i] - (i === lowest ? over : 0)
  const found: Lines = {
    count: size,
    head: new Uint16Array(size),
    from: new Uint16Array(size),
    to: new Uint16Array(size),
    weight: new Float32Array(size),
    cut,
  }
  let left = lowest < BINS ? counts[lowest] - over : 0
  each(scene, window, only, (head, from, to, weight) => {
    const b = bin(weight)
    if (b < lowest || (b === lowest && left-- <= 0)) return
    const place = starts[b]++
    found.head[place] = head
    found.from[place] = from
    found.to[place] = to
    found.weight[place] = weight
  })
  return found
}

function bin(weight: number): number {
  return Math.min(BINS - 1, Math.floor(Math.sqrt(weight) * BINS))
}

type Use = (head: number, from: number, to: number, weight: number) => void

function each(
  { weights, heads, from, to, floors }: Scene,
  { first, end }: Window,
  only: { side: Side; place: number } | null,
  use: Use,
): void {
  const [, rows, columns] = weights.shape
  for (const head of heads) {
    for (let i = 0; i < from.length; i++) {
      if (only?.side === 'from' && only.place !== i) continue
      const row = head * rows + from[i]
      const least = Math.max(floors ? floors[row] : 0, FAINTEST)
      const inside = i >= first && i < end
      let [j, stop] = inside ? [0, to.length] : [Math.max(first, 0), Math.min(end, to.length)]
      if (only) [j, stop] = only.side === 'to' ? [only.place, only.place + 1] : [0, to.length]
      for (; j < stop; j++) {
        const weight = weights.data[row * columns + to[j]]
        if (weight >= least) use(head, i, j, weight)
      }
    }
  }
}

/** What one token gives to each of the other side (or gets from them): the mean over the heads, and by head. */
export function strengths(
  { weights, heads, from, to }: Scene,
  side: Side,
  place: number,
): { mean: Float32Array; byHead: Float32Array[] } {
  const [, rows, columns] = weights.shape
  const others = side === 'from' ? to : from
  const own = side === 'from' ? from[place] : to[place]
  const at = (head: number, other: number) =>
    side === 'from'
      ? weights.data[(head * rows + own) * columns + other]
      : weights.data[(head * rows + other) * columns + own]
  const byHead = heads.map((head) => Float32Array.from(others, (other) => at(head, other)))
  const mean = Float32Array.from(
    others,
    (_, i) => byHead.reduce((sum, row) => sum + row[i], 0) / Math.max(heads.length, 1),
  )
  return { mean, byHead }
}

/** The mean of some heads, (shown rows, shown columns); what is below its floor counts as nothing. */
export function meanOf({ weights: { shape, data }, heads, from, to, floors }: Scene): Float32Array {
  const [, rows, columns] = shape
  const width = to.length
  const found = new Float32Array(from.length * width)
  for (const head of heads) {
    for (let i = 0, place = 0; i < from.length; i++) {
      const row = head * rows + from[i]
      const least = floors ? floors[row] : 0
      const begin = row * columns
      for (let j = 0; j < width; j++, place++) {
        const weight = data[begin + to[j]]
        if (weight >= least) found[place] += weight
      }
    }
  }
  const share = 1 / Math.max(heads.length, 1)
  for (let i = 0; i < found.length; i++) found[i] *= share
  return found
}

/** What has no weight at all, since it may not be looked at, as NaN: a heatmap leaves it paper. */
export function orNothing(weights: Float32Array): Float32Array {
  const found = new Float32Array(weights.length)
  for (let i = 0; i < found.length; i++) found[i] = weights[i] || NaN
  return found
}
