// What the panels of the tasks have in common: what they tell the frame around them, and pieces marked in a text.

import type { Model } from '../../lib/api'
import type { Code } from '../../lib/code'
import type { Saved } from '../../lib/save'
import { comparesWords } from '../../lib/tabs'

export interface Shown {
  code: Code
  save: Saved
}
export interface PanelProps {
  model: Model
  onshow: (shown: Shown) => void
}

export interface Span {
  start: number // in characters as Python counts them: code points
  end: number
}
export interface Segment<S> {
  text: string
  span: S | null
}

/** A text cut where spans begin and end. Where two overlap, the first one has it. */
export function segments<S extends Span>(text: string, spans: S[]): Segment<S>[] {
  const letters = Array.from(text)
  const found: Segment<S>[] = []
  let at = 0
  for (const span of [...spans].sort((a, b) => a.start - b.start)) {
    if (span.start < at || span.end <= span.start || span.end > letters.length) continue
    if (span.start > at) found.push({ text: letters.slice(at, span.start).join(''), span: null })
    found.push({ text: letters.slice(span.start, span.end).join(''), span })
    at = span.end
  }
  if (at < letters.length) found.push({ text: letters.slice(at).join(''), span: null })
  return found
}

const LANGUAGES =
  /^(arabic|bulgarian|catalan|chinese|czech|danish|dutch|english|finnish|french|german|greek|hebrew|hindi|hungarian|indonesian|italian|japanese|korean|latin|norwegian|persian|polish|portuguese|romanian|russian|spanish|swahili|swedish|thai|turkish|ukrainian|urdu|vietnamese)$/i
const CODES =
  /^(__label__)?(ar|bg|ca|cs|da|de|el|en|es|fa|fi|fr|he|hi|hu|id|it|ja|ko|la|nb|nl|no|pl|pt|ro|ru|sv|sw|th|tr|uk|ur|vi|zh|ces|dan|deu|ell|eng|fin|fra|hun|ita|jpn|kor|nld|pol|por|ron|rus|spa|swe|tur|ukr)$/i

/** Whether a classifier tells languages apart: most of its labels are names or codes of languages. */
export function tellsLanguages(model: Model): boolean {
  const labels = model.labels ?? []
  const known = labels.filter((label) => LANGUAGES.test(label) || CODES.test(label)).length
  return model.abilities.includes('classify') && known >= 2 && known >= labels.length / 2
}

/** Whether a task is what a model was made for: a classifier of languages is for Language, not for Classify. */
export function madeFor(task: string, model: Model): boolean {
  const languages = tellsLanguages(model)
  return task === 'language'
    ? languages
    : task === 'neighbours'
      ? comparesWords(model)
      : (model.abilities as string[]).includes(task) && !(task === 'classify' && languages)
}
