// Prompts to start from, with the settings that go with them: those that the model can go on with. Short, as small
// models read little at once.

import type { Model } from '../../lib/api'
import { examples, readsWords } from '../../lib/examples'

const SMALL = 50e6 // parameters: a model below it learns nothing from examples in its prompt

export interface Starter {
  id: string
  label: string
  text: string
  temperature: number
  stop: string[]
  /** It would write nothing of use with this one. */
  beyond?: boolean
}

const STORY: Starter = {
  id: 'story',
  label: 'Story',
  text: 'Once upon a time, in a castle by the sea, there lived an old king who',
  temperature: 0.8,
  stop: [],
}
const BY_EXAMPLE: Starter[] = [
  {
    id: 'questions',
    label: 'Question and answer',
    text: 'Q: What is the capital of Italy?\nA: Rome.\n\nQ: Who wrote Hamlet?\nA: William Shakespeare.\n\nQ: What is the largest planet?\nA:',
    temperature: 0,
    stop: ['\n'],
  },
  {
    id: 'classification',
    label: 'Classification by examples',
    text: 'Review: A joy from start to end.\nMood: good\n\nReview: I fell asleep, it was so dull.\nMood: bad\n\nReview: The best evening of the year.\nMood:',
    temperature: 0,
    stop: ['\n'],
  },
  {
    id: 'translation',
    label: 'Translation',
    text: 'English: Good morning.\nFrench: Bonjour.\n\nEnglish: Thank you, my friend.\nFrench: Merci, mon ami.\n\nEnglish: Where is the sea?\nFrench:',
    temperature: 0,
    stop: ['\n'],
  },
  {
    id: 'language',
    label: 'Language detection',
    text: 'Text: Guten Tag\nLanguage: German\n\nText: Buona sera\nLanguage: Italian\n\nText: How do you do\nLanguage: English\n\nText: Je ne sais pas\nLanguage:',
    temperature: 0,
    stop: ['\n'],
  },
]

/** All prompts for a model; those that are beyond it come last, and are to be seen, not to be chosen. */
export function starters(model: Model): Starter[] {
  const small = model.parameters < SMALL && !model.chat
  const own = examples(model).map((text, i) => ({
    id: `own-${i}`,
    label: text.replace(/\s+/g, ' ').trim() + ' …',
    text,
    temperature: 0.8,
    stop: [],
  }))
  if (!readsWords(model)) return own
  return [...(small ? own : []), STORY, ...BY_EXAMPLE.map((one) => (small ? { ...one, beyond: true } : one))]
}
