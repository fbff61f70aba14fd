// What the stages of a forward pass share: the layer and head looked at, and the step of a norm.

import type { LearnedNorm, StepsWeights } from '../../lib/api'
import type { Numbers } from '../../lib/arrays'
import { normed } from './explain'
import { rowOf, type Step } from './matrix'

/** A step but for what is the same in most. */
export type Made = Omit<Step, 'part' | 'scale' | 'columns'> & Partial<Pick<Step, 'scale' | 'columns'>>
export type LayerWeights = StepsWeights['layers'][number]

/** Where one looks: a layer, and a head in it. */
export interface Place {
  layer: number
  head: number
}

export function norm(
  id: string,
  title: string,
  from: string,
  before: Numbers,
  after: Numbers,
  how: LearnedNorm,
  about: string,
  sign?: string,
): Made {
  return {
    id,
    title,
    matrix: after,
    about,
    sign,
    explain: (row, column) => normed(rowOf(before, row), column, how, from ? [{ step: from, row }] : []),
  }
}
