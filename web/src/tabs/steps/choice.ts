// How the numbers of the choice came about: a logit, what the temperature makes of it, its probability, its share.

import type { Steps, StepsWeights } from '../../lib/api'
import { number, percent } from '../../lib/format'
import { products, softmaxed } from './explain'
import { counted, rowOf, total, type Explanation } from './matrix'
import type { Candidate, How } from './sampling'

export const COLUMNS = ['logit', 'scaled', 'probability', 'share'] as const
export type Column = (typeof COLUMNS)[number]

export interface Choice {
  pass: Steps
  weights: StepsWeights
  /** All tokens, likeliest first. */
  all: Candidate[]
  how: How
  /** A token as it is shown. */
  name: (candidate: Candidate) => string
}

export function explainChoice(choice: Choice, index: number, column: Column): Explanation {
  const { all, how, name } = choice
  const one = all[index]
  const greedy = how.temperature <= 0
  if (column === 'logit') return logit(choice, one)
  if (column === 'scaled') {
    if (greedy)
      return { words: 'At temperature 0 nothing is divided: the likeliest is taken.', value: one.logit, marks: [] }
    return {
      words: 'The logit, divided by the temperature.',
      formula: [one.logit, ' ÷ ', how.temperature],
      value: one.logit / how.temperature,
      marks: [],
    }
  }
  if (column === 'probability')
    return softmaxed(
      all.map(name),
      all.map((other) => other.scaled),
      index,
      [],
      'each logit',
    )
  return share(all, index, how)
}

function logit({ pass, weights: { head }, name }: Choice, one: Candidate): Explanation {
  const row = rowOf(pass.final, pass.tokens.length - 1).map((x) => x * (head.scale ?? 1))
  const found = products(
    counted(row.length),
    ['last row', 'token'],
    row,
    rowOf(head.weight, one.token.id),
    head.bias ? head.bias.data[one.token.id] : null,
  )
  const words = `The last row of the pass, times the learned vector of “${name(one)}”, number by number, added up${head.bias ? ', and the bias of the token' : ''}.`
  if (head.softcap === null) return { words, ...found, formula: ['sum'], marks: [] }
  return {
    words: `${words} The sum is brought within ±${head.softcap}.`,
    terms: found.terms,
    formula: [head.softcap, ' × tanh(', found.value, ' ÷ ', head.softcap, ')'],
    value: head.softcap * Math.tanh(found.value / head.softcap),
    marks: [],
  }
}

function share(all: Candidate[], index: number, { temperature, topK, topP }: How): Explanation {
  const one = all[index]
  const left = all.filter((other) => !other.cut)
  if (one.cut && temperature <= 0)
    return { words: 'At temperature 0 the likeliest token is taken, and no other can be.', value: 0, marks: [] }
  if (one.cut === 'top-k')
    return { words: `It is number ${index + 1} in order, and top-k leaves the ${topK} likeliest.`, value: 0, marks: [] }
  if (one.cut) {
    const kept = topK > 0 ? all.slice(0, topK) : all
    const before =
      total(all.slice(0, index).map((other) => other.probability)) / total(kept.map((other) => other.probability))
    return {
      words: `The ${index} likelier tokens have ${percent(before)} together${topK > 0 ? ' of what top-k left' : ''}, and top-p is content with ${percent(topP)}.`,
      value: 0,
      marks: [],
    }
  }
  const sum = total(left.map((other) => other.probability))
  const words =
    left.length === all.length
      ? 'Nothing was cut: the share is the probability.'
      : `Its probability, divided by that of all ${left.length} that are left (${number(sum)}).`
  return { words, formula: [one.probability, ' ÷ ', sum], value: one.probability / sum, marks: [] }
}
