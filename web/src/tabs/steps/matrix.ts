// What the drawing and the explanations of a forward pass share: matrices, the cells of them, and how one came about.

import { slice, type Numbers } from '../../lib/arrays'

/** A row, a column or a cell of a step's matrix that a number was made of. */
export interface Mark {
  step: string
  row?: number
  column?: number
}

/** Numbers side by side, one column per term: what was multiplied or added up. */
export interface Terms {
  labels: string[]
  rows: { name: string; values: number[] }[]
  /** The column that is looked at itself. */
  chosen?: number
}

export interface Explanation {
  /** In words, with the numbers in it. */
  words: string
  /** The last line of the sum. */
  formula?: string
  terms?: Terms
  marks: Mark[]
}

export interface Step {
  id: string
  /** The part of the model that it stands in. */
  part: string
  title: string
  about: string
  /** What stands between it and the step before. */
  sign?: string
  matrix: Numbers // (tokens, columns)
  scale: 'sequential' | 'diverging'
  columns: 'numbers' | 'tokens'
  explain: (row: number, column: number) => Explanation
}

export const at = (matrix: Numbers, row: number, column: number): number => matrix.data[row * matrix.shape[1] + column]
export const rowOf = (matrix: Numbers, row: number): number[] => [...slice(matrix, row).data]
export const columnOf = (matrix: Numbers, column: number): number[] => Array.from({ length: matrix.shape[0] }, (_, r) => at(matrix, r, column))
export const counted = (n: number): string[] => Array.from({ length: n }, (_, i) => String(i))

/** Whether two numbers of float32 are the same but for rounding. */
export const near = (a: number, b: number, size = 1): boolean => Math.abs(a - b) <= 2e-3 * Math.max(Math.abs(a), Math.abs(b)) + 1e-4 * size

export function sum(...matrices: Numbers[]): Numbers {
  const data = new Float32Array(matrices[0].data.length)
  for (const matrix of matrices) for (let i = 0; i < data.length; i++) data[i] += matrix.data[i]
  return { shape: matrices[0].shape, data }
}

export function same(a: Numbers, b: Numbers): boolean {
  if (a.data.length !== b.data.length) return false
  for (let i = 0; i < a.data.length; i++) if (!near(a.data[i], b.data[i])) return false
  return true
}

export interface Moments {
  mean: number
  deviation: number
  /** The square root of the mean of the squares. */
  size: number
}

export function moments(values: number[]): Moments {
  const mean = values.reduce((a, b) => a + b, 0) / values.length
  const squares = values.reduce((a, b) => a + b * b, 0) / values.length
  return { mean, deviation: Math.sqrt(Math.max(squares - mean * mean, 0)), size: Math.sqrt(squares) }
}

export interface Norm {
  kind: 'layer' | 'rms'
  gain: number
  shift: number
}

/**
 * The norm that made `after` of `before`, and what it learned for a column: found from the numbers themselves, which lie
 * on a line. Null where there are too few tokens to tell, or it is neither of the two.
 */
export function normOf(before: Numbers, after: Numbers, column: number): Norm | null {
  const rows = before.shape[0]
  if (rows < 3) return null
  const of = counted(rows).map((_, r) => moments(rowOf(before, r)))
  const y = columnOf(after, column)
  const x = columnOf(before, column)
  for (const kind of ['layer', 'rms'] as const) {
    const z = x.map((value, r) => (kind === 'layer' ? (value - of[r].mean) / Math.sqrt(of[r].deviation ** 2 + 1e-5) : value / Math.sqrt(of[r].size ** 2 + 1e-5)))
    const [mz, my] = [moments(z), moments(y)]
    const together = z.reduce((total, value, r) => total + (value - mz.mean) * (y[r] - my.mean), 0) / rows
    const gain = kind === 'layer' ? together / (mz.deviation ** 2 || 1) : z.reduce((total, value, r) => total + value * y[r], 0) / (rows * mz.size ** 2 || 1)
    const shift = kind === 'layer' ? my.mean - gain * mz.mean : 0
    if (z.every((value, r) => near(gain * value + shift, y[r], 10 * my.size))) return { kind, gain, shift }
  }
  return null
}

const tanh = (x: number) => 0.5 * x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3)))
const sigmoid = (x: number) => 1 / (1 + Math.exp(-x))
const ACTIVATIONS: [string, (x: number) => number][] = [
  ['ReLU', (x) => Math.max(x, 0)],
  ['GELU', tanh], // the one with erf differs by less than is shown
  ['SiLU', (x) => x * sigmoid(x)],
  ['GELU with a sigmoid', (x) => x * sigmoid(1.702 * x)],
  ['ReLU²', (x) => Math.max(x, 0) ** 2],
]

/** The activation that made `after` of `before`; null where something else came in, as in a gated network. */
export function activationOf(before: Numbers, after: Numbers): string | null {
  if (before.data.length !== after.data.length) return null
  const found = ACTIVATIONS.find(([, f]) => before.data.every((x, i) => Math.abs(f(x) - after.data[i]) < 2e-3 + 1e-3 * Math.abs(after.data[i])))
  return found?.[0] ?? null
}
