// A text and its tokens, and whether a model can read it at all: asked before anything that takes longer.

import { api, type Model, type Token } from '../../lib/api'
import { live, type Live } from '../../lib/live.svelte'

interface Read {
  model: string
  text: string
  tokens: Token[]
}

export class Counted {
  constructor(
    private readonly given: () => { model: Model; text: string },
    readonly answer: Live<Read>,
    private readonly anyLength: boolean,
  ) {}

  /** Why it cannot be read, in words for the person at the page. */
  get problem(): string {
    const { model, text } = this.given()
    if (!text.trim()) return 'Write something first.'
    if (unreadable(model, text))
      return `${model.id} reads numbers from 0 to ${model.vocabulary! - 1}, such as 3 1 4 1 5.`
    return ''
  }

  /** How many tokens it has, where those are more than the model reads. */
  get excess(): { n: number; most: number } | null {
    const most = this.given().model.context
    const n = this.answer.value?.tokens.length ?? 0
    return !this.anyLength && most !== null && n > most ? { n, most } : null
  }

  /** What to ask the model: the text that the tokens are of; null while there is none that it can read. */
  get ask(): { model: string; text: string } | null {
    const read = this.answer.value
    return this.problem || this.excess || !read ? null : { model: read.model, text: read.text }
  }
}

const unreadable = (model: Model, text: string) =>
  model.reads === 'numbers' &&
  (/[^\d\s,]/.test(text) || text.split(/[\s,]+/).some((number) => Number(number) >= model.vocabulary!))

/** With `anyLength`, a text may be longer than the model's context: it is read in windows. */
export function counted(given: () => { model: Model; text: string }, { anyLength = false } = {}): Counted {
  const answer = live(
    () => {
      const { model, text } = given()
      return text.trim() && !unreadable(model, text) ? { model: model.id, text } : null
    },
    async (body, signal) => ({ ...body, tokens: (await api.tokens(body, signal)).tokens }),
  )
  return new Counted(given, answer, anyLength)
}
