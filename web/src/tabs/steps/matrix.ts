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
  /** `adds`: the numbers of a row have a sum that means something. The last row is what counts. */
  rows: { name: string; values: number[]; adds?: boolean }[]
  /** Added to the last row, and multiplied by nothing. */
  bias?: number
  /** The column that is looked at itself. */
  chosen?: number
}

/** The columns for which there is room: all in their order, or the largest first, and then what the others come to. */
export function fitting(
  { labels, rows, bias, chosen }: Terms,
  room: number,
): { labels: string[]; rows: (number | null)[][]; chosen?: number } {
  const last = rows[rows.length - 1].values
  const ends = bias === undefined ? 0 : 1
  const all = labels.map((_, i) => i)
  const whole = all.length + ends <= room
  const order = all.toSorted(
    (i, j) => Number(j === chosen) - Number(i === chosen) || Math.abs(last[j]) - Math.abs(last[i]),
  )
  const shown = whole ? all : order.slice(0, Math.max(1, room - ends - 1))
  const others = whole ? [] : [all.length - shown.length]
  return {
    labels: [...shown.map((i) => labels[i]), ...others.map((n) => `${n} more`), ...(ends ? ['bias'] : [])],
    rows: rows.map(({ values, adds }, r) => [
      ...shown.map((i) => values[i]),
      ...others.map(() => (adds ? total(values) - total(shown.map((i) => values[i])) : null)),
      ...(ends ? [r === rows.length - 1 ? bias! : null] : []),
    ]),
    chosen: chosen === undefined ? undefined : shown.indexOf(chosen),
  }
}

export interface Explanation {
  /** In words, with the numbers in it. */
  words: string
  terms?: Terms
  /** The last line: words and numbers that come to the value. */
  formula?: (string | number)[]
  /** What all that comes to, computed here; the number that is shown is the model's. */
  value: number
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
export const counted = (n: number): string[] => Array.from({ length: n }, (_, i) => String(i))
export const total = (values: number[]): number => values.reduce((a, b) => a + b, 0)
