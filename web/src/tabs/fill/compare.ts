// Words in two sentences: how much likelier each is in one than in the other, which are worth a label, and where it
// goes.

import type { Numbers } from '../../lib/arrays'

export interface Filled {
  sentences: { text: string; model: string; choices: string[] }[]
  words: string[]
  logprobs: Numbers // (sentences, words), natural logarithms
  note: string | null
}
export type Pair = [number, number]
export type Kind = 'likelihoods' | 'differences'

export const row = (filled: Filled, i: number): Float32Array => {
  const n = filled.words.length
  return filled.logprobs.data.subarray(i * n, (i + 1) * n)
}

/** log p(word | b) - log p(word | a): 0 is no difference, 0.69 twice as likely in b. */
export function differences(filled: Filled, [a, b]: Pair): Float32Array {
  const [x, y] = [row(filled, a), row(filled, b)]
  return x.map((p, i) => y[i] - p)
}

export function pairs(n: number): Pair[] {
  const found: Pair[] = []
  for (let a = 0; a < n; a++) for (let b = a + 1; b < n; b++) found.push([a, b])
  return found
}

/** What tells two sentences apart, and what they have in common. */
export function told(filled: Filled, [a, b]: Pair): { a: string; b: string; common: string } {
  const facets = (i: number) => {
    const { choices, text } = filled.sentences[i]
    return choices.length ? choices.map((choice) => choice.trim() || '∅') : [text]
  }
  const [x, y] = [facets(a), facets(b)]
  if (x.length !== y.length) return { a: x.join(', '), b: y.join(', '), common: '' }
  const differ = x.map((facet, i) => facet !== y[i])
  const some = (from: string[], which: boolean) => from.filter((_, i) => differ[i] === which).join(', ')
  if (!differ.some(Boolean)) return { a: x.join(', '), b: y.join(', '), common: '' } // the same sentence twice
  return { a: some(x, true), b: some(y, true), common: some(x, false) }
}

/** The largest difference that has a colour of its own: beyond it all are as dark; at least twice as likely. */
export function reach(difference: Float32Array): number {
  const sizes = difference.map(Math.abs).sort()
  return Math.max(sizes[Math.floor(0.98 * (sizes.length - 1))] ?? 0, Math.LN2)
}

export function extent(data: ArrayLike<number>): [number, number] {
  let [low, high] = [Infinity, -Infinity]
  for (let i = 0; i < data.length; i++) {
    low = Math.min(low, data[i])
    high = Math.max(high, data[i])
  }
  return low <= high ? [low, high] : [-1, 0]
}

/** Indices of the words, the most likely in b first. */
export function ranking(difference: Float32Array): Uint32Array {
  return Uint32Array.from(difference, (_, i) => i).sort((i, j) => difference[j] - difference[i])
}

/** The words that deserve a label, the first most: a word that is rare in both says less than a likely one with the
 *  same difference, and of many words those that hardly differ get none. */
export function striking(difference: Float32Array, x: Float32Array, y: Float32Array): number[] {
  const [low, high] = extent(x.map((p, i) => p + y[i]))
  const score = difference.map((d, i) => Math.abs(d) * (0.35 + 0.65 * ((x[i] + y[i] - low) / (high - low || 1))))
  const least = difference.length > 60 ? 0.3 * reach(difference) : 0
  const found = [...score.keys()].filter((i) => Math.abs(difference[i]) >= least).sort((i, j) => score[j] - score[i])
  // The outermost of both sides come first, however rare they are: one asks for them.
  const order = ranking(difference)
  const ends = [order[0], order[order.length - 1]].filter((i) => i !== undefined && difference[i] !== 0)
  return [...new Set([...ends, ...found])]
}

export interface Label {
  index: number
  x: number
  y: number
  anchor: 'start' | 'end' | 'middle'
}
interface Box {
  left: number
  top: number
  right: number
  bottom: number
}
interface Room {
  width: number
  height: number
  font: number // pixels
  measure: (text: string) => number
  radius: number
}

/** Labels that overlap neither each other nor the edge, for the first of the wanted ones that find a place. */
export function layOut(
  wanted: number[],
  most: number,
  words: string[],
  px: Float32Array,
  py: Float32Array,
  up: (i: number) => boolean,
  room: Room,
): Label[] {
  const crowded = words.length > 60
  const placed: Label[] = []
  const taken: Box[] = []
  const { font, radius } = room
  for (const [place, i] of wanted.entries()) {
    if (placed.length >= most) break
    const wide = room.measure(words[i])
    const gap = radius + 3
    const left: Label = { index: i, x: px[i] - gap, y: py[i], anchor: 'end' }
    const right: Label = { index: i, x: px[i] + gap, y: py[i], anchor: 'start' }
    const above: Label = { index: i, x: px[i], y: py[i] - gap - font / 2, anchor: 'middle' }
    const below: Label = { index: i, x: px[i], y: py[i] + gap + font / 2, anchor: 'middle' }
    // Away from the other points first; among many, nowhere else.
    const spots = up(i) ? [left, above, right, below] : [right, below, left, above]
    if (crowded && place > 1) spots.length = 2
    const free = spots.find((spot) => {
      const box = boxOf(spot, wide, font)
      const inside = box.left >= 2 && box.right <= room.width - 2 && box.top >= 2 && box.bottom <= room.height - 2
      return (
        inside &&
        taken.every(
          (other) =>
            box.right < other.left || box.left > other.right || box.bottom < other.top || box.top > other.bottom,
        )
      )
    })
    if (!free) continue
    placed.push(free)
    taken.push(boxOf(free, wide, font), {
      left: px[i] - radius,
      right: px[i] + radius,
      top: py[i] - radius,
      bottom: py[i] + radius,
    })
  }
  return placed
}

export function boxOf({ x, y, anchor }: Label, wide: number, font: number): Box {
  const left = anchor === 'start' ? x : anchor === 'end' ? x - wide : x - wide / 2
  return { left, right: left + wide, top: y - font * 0.6, bottom: y + font * 0.6 }
}

/** The point nearest to a place, at most `within` pixels away. */
export function nearest(px: Float32Array, py: Float32Array, x: number, y: number, within: number): number | null {
  let [best, least] = [-1, within * within]
  for (let i = 0; i < px.length; i++) {
    const far = (px[i] - x) ** 2 + (py[i] - y) ** 2
    if (far < least) [best, least] = [i, far]
  }
  return best < 0 ? null : best
}

const RAISED: Record<string, string> = {
  '-': '⁻',
  0: '⁰',
  1: '¹',
  2: '²',
  3: '³',
  4: '⁴',
  5: '⁵',
  6: '⁶',
  7: '⁷',
  8: '⁸',
  9: '⁹',
}

/** Powers of ten inside a range of log probabilities, at most `most`, and how they are written. */
export function chanceTicks([low, high]: [number, number], most: number): { at: number; text: string }[] {
  const [first, last] = [Math.ceil(low / Math.LN10), Math.floor(high / Math.LN10 + 1e-9)]
  const step = Math.max(1, Math.ceil((last - first + 1) / most))
  const found: { at: number; text: string }[] = []
  for (let e = last; e >= first; e -= step) {
    const text =
      first < -5
        ? e === 0
          ? '1'
          : '10' + [...String(e)].map((c) => RAISED[c]).join('')
        : `${Number((100 * 10 ** e).toPrecision(1))} %`
    found.push({ at: e * Math.LN10, text })
  }
  return found
}

/** How many times likelier, up to a difference of `most` either way: 2, 4, 8 or 10, 100, 1000. */
export function ratioTicks(most: number, count: number): { at: number; text: string }[] {
  const base = most >= 1.6 * Math.LN10 ? 10 : 2
  const n = Math.floor(most / Math.log(base) + 1e-9)
  const step = Math.max(1, Math.ceil(n / count))
  const found = [{ at: 0, text: '1×' }]
  for (let e = step; e <= n; e += step) {
    const text =
      base ** e >= 1e6
        ? '10' + [...String(e)].map((c) => RAISED[c]).join('') + '×'
        : `${(base ** e).toLocaleString('en')}×`
    found.push({ at: e * Math.log(base), text }, { at: -e * Math.log(base), text })
  }
  return found
}

/** How many times likelier a difference means, whichever way. */
export function times(difference: number): string {
  const ratio = Math.exp(Math.abs(difference))
  const text =
    ratio >= 1e6
      ? ratio.toExponential(1)
      : ratio >= 100
        ? Math.round(ratio).toLocaleString('en')
        : ratio >= 10
          ? ratio.toFixed(0)
          : ratio.toFixed(1)
  return `${text}×`
}
