// How a number came about: products that were added up, norms, activations, rotations, a softmax. Each explanation is
// computed here from what it shows, so that what it comes to may be held against the model's own number.

import type { Affine, LearnedNorm } from '../../lib/api'
import type { Numbers } from '../../lib/arrays'
import { number } from '../../lib/format'
import { at, counted, rowOf, total, type Explanation, type Mark, type Terms } from './matrix'

/** Products that are added up, and a bias where there is one. */
export function products(
  labels: string[],
  [a, b]: [string, string],
  left: number[],
  right: number[],
  bias: number | null = null,
): { terms: Terms; value: number } {
  const values = left.map((x, i) => x * right[i])
  const rows = [
    { name: a, values: left },
    { name: b, values: right },
    { name: 'product', values, adds: true },
  ]
  return { terms: { labels, rows, ...(bias === null ? {} : { bias }) }, value: total(values) + (bias ?? 0) }
}

/** A row times a column of a learned matrix. */
export function learned(
  step: string,
  matrix: Numbers,
  row: number,
  affine: Affine,
  column: number,
  whose: string,
): Explanation {
  const left = rowOf(matrix, row)
  const bias = affine.bias ? affine.bias.data[column] : null
  return {
    words: `This row of ${left.length} numbers, times column ${column} of ${whose}, number by number, added up${bias === null ? '' : ', and the bias of that column'}.`,
    ...products(counted(left.length), ['row', 'matrix'], left, rowOf(affine.weight, column), bias),
    formula: ['sum'],
    marks: [{ step, row }],
  }
}

/** Numbers that are added: a + b − c. */
export function plus(...values: number[]): (string | number)[] {
  return values.flatMap((x, i) => (i === 0 ? [x] : x < 0 ? [' − ', -x] : [' + ', x]))
}

export function added(
  words: string,
  parts: [step: string, matrix: Numbers][],
  row: number,
  column: number,
): Explanation {
  const values = parts.map(([, matrix]) => at(matrix, row, column))
  return {
    words,
    formula: plus(...values),
    value: total(values),
    marks: parts.map(([step]) => ({ step, row, column })),
  }
}

/** A number that is where it is said to be: in a table, or in another step. */
export function taken(words: string, where: string, value: number, marks: Mark[] = []): Explanation {
  return { words, formula: [where], value, marks }
}

/** Values brought to a common size; `place` is that of the number that is looked at, among them and in the gains. */
export function normed(
  values: number[],
  place: number,
  { kind, gain, shift, eps }: LearnedNorm,
  marks: Mark[],
  learnedAt = place,
): Explanation {
  const x = values[place]
  const mean = kind === 'layer' ? total(values) / values.length : 0
  const size = Math.sqrt(total(values.map((v) => (v - mean) ** 2)) / values.length + eps)
  const [times, more] = [gain ? gain.data[learnedAt] : 1, shift ? shift.data[learnedAt] : 0]
  const tail = [' × ', times, ...(shift ? [more < 0 ? ' − ' : ' + ', Math.abs(more)] : [])]
  const value = ((x - mean) / size) * times + more
  const after = `times the learned gain of this column${shift ? ', and its learned shift' : ''}`
  if (kind === 'rms')
    return {
      words: `Divided by the root of the row’s mean square, ${number(size)}; ${after}.`,
      formula: [x, ' ÷ ', size, ...tail],
      value,
      marks,
    }
  return {
    words: `Less the row’s mean, ${number(mean)}; divided by its standard deviation, ${number(size)}; ${after}.`,
    formula: ['(', x, ...(mean < 0 ? [' + ', -mean] : [' − ', mean]), ') ÷ ', size, ...tail],
    value,
    marks,
  }
}

/** By Abramowitz and Stegun 7.1.26, to 1.5e-7. */
function erf(x: number): number {
  const t = 1 / (1 + 0.3275911 * Math.abs(x))
  const tail =
    ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t * Math.exp(-x * x)
  return Math.sign(x) * (1 - tail)
}
const sigmoid = (x: number): number => 1 / (1 + Math.exp(-x))
const byTanh = {
  name: 'GELU',
  of: (x: number) => 0.5 * x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3))),
}
const silu = { name: 'SiLU', of: (x: number) => x * sigmoid(x) }

/** The activations by the names of the server. */
const ACTIVATIONS: Record<string, { name: string; of: (x: number) => number }> = {
  relu: { name: 'ReLU', of: (x) => Math.max(x, 0) },
  gelu: { name: 'GELU', of: (x) => 0.5 * x * (1 + erf(x / Math.SQRT2)) },
  gelu_new: byTanh,
  gelu_fast: byTanh,
  gelu_pytorch_tanh: byTanh,
  quick_gelu: { name: 'GELU', of: (x) => x * sigmoid(1.702 * x) },
  silu,
  swish: silu,
  tanh: { name: 'tanh', of: Math.tanh },
}
export const activationOf = (name: string | null): { name: string; of: (x: number) => number } =>
  ACTIVATIONS[name ?? ''] ?? { name: name ?? 'activation', of: () => NaN }

/** Scores of which shares are made; `chosen` is the one that is looked at. */
export function softmaxed(
  labels: string[],
  scores: number[],
  chosen: number,
  marks: Mark[],
  words = 'each score of the row',
): Explanation {
  const most = Math.max(...scores)
  const powers = scores.map((x) => Math.exp(x - most))
  const sum = total(powers)
  const mine = powers[chosen]
  return {
    words: `e to the power of ${words} (less the largest, ${number(most)}, which changes nothing), and the share of this one in the sum.`,
    terms: {
      labels,
      rows: [
        { name: 'score', values: scores },
        { name: 'e to it', values: powers, adds: true },
        { name: 'share', values: powers.map((x) => x / sum), adds: true },
      ],
      chosen,
    },
    formula: [mine, ' ÷ ', sum],
    value: mine / sum,
    marks,
  }
}

export interface Rotation {
  cos: Numbers
  sin: Numbers
  layout: 'halves' | 'interleaved'
}

/** A number of a query or key that was turned together with its partner (Su et al. 2021). */
export function turned(
  step: string,
  values: number[],
  row: number,
  column: number,
  { cos, sin, layout }: Rotation,
): Explanation {
  const pairs = cos.shape[1]
  if (column >= 2 * pairs)
    return taken(
      `Only the first ${2 * pairs} numbers of each head are turned: this one stays.`,
      `number ${column}`,
      values[column],
      [{ step, row, column }],
    )
  const [pair, first] = layout === 'halves' ? [column % pairs, column < pairs] : [column >> 1, column % 2 === 0]
  const [a, b] = layout === 'halves' ? [pair, pair + pairs] : [2 * pair, 2 * pair + 1]
  const [c, s] = [at(cos, row, pair), at(sin, row, pair)]
  const degrees = (((Math.atan2(s, c) * 180) / Math.PI + 360) % 360).toFixed(0)
  return {
    words: `At place ${row} the numbers ${a} and ${b} are turned together by ${degrees}° (cosine ${number(c)}, sine ${number(s)}), so that the product of a query and a key tells how far apart they are.`,
    ...products(
      [String(a), String(b)],
      ['number', first ? 'cos, −sin' : 'sin, cos'],
      [values[a], values[b]],
      first ? [c, -s] : [s, c],
    ),
    formula: ['sum'],
    marks: [
      { step, row, column: a },
      { step, row, column: b },
    ],
  }
}
