// What models are for, in the order in which a list has them.

import type { Model, Pullable } from './api'

export type Purpose = Model['purpose']

const LABELS: Record<Purpose, string> = {
  write: 'Write',
  chat: 'Chat',
  fill: 'Fill in words',
  translate: 'Translate and rewrite',
  classify: 'Classify',
  answer: 'Answer from a passage',
  tag: 'Tag names',
  embed: 'Compare sentences',
  classify_image: 'See images',
  complete_image: 'Draw images',
  other: 'Other',
}

/** Models by what they are for; purposes that none has are left out. */
export function byPurpose<M extends Model | Pullable>(models: M[]): { label: string; models: M[] }[] {
  return (Object.keys(LABELS) as Purpose[])
    .map((purpose) => ({ label: LABELS[purpose], models: models.filter((model) => model.purpose === purpose) }))
    .filter((group) => group.models.length)
}

export const purposeOf = ({ purpose }: Model | Pullable): string => LABELS[purpose].toLowerCase()
