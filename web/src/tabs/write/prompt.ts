// What of a text a model reads, when its context is smaller than the text and the answer together: the end of it.

import { api, type Model, type Token } from '../../lib/api'
import { last, MOST_CHARACTERS } from '../../lib/long'

/** How a prompt is read: one that a chat template made has its special tokens in it. */
export const readAs = (rendered: boolean) => (rendered ? { allow_special: true, add_special_tokens: false } : {})

export interface Fitted {
  /** The text, or the ids of its last tokens. */
  prompt: string | number[]
  max_tokens: number
  /** How many tokens are read, and how many there are; null: all, not counted. */
  read: number | null
  total: number | null
}

/** The last tokens that leave room for the answer, which gets at least half of the context where both are long. */
export function fit(text: string, tokens: Token[], context: number | null, length: number): Fitted {
  const total = tokens.length
  if (context === null || total + length <= context) return { prompt: text, max_tokens: length, read: total, total }
  const read = Math.min(total, length === 0 ? context : Math.max(context - length, Math.ceil(context / 2)))
  const max_tokens = Math.min(length, context - read)
  if (read === total) return { prompt: text, max_tokens, read, total }
  // A token that begins every text of this model begins the end of one, too.
  const first = read > 1 && tokens[0].special && tokens[0].raw !== '<unk>' ? [tokens[0].id] : []
  return {
    prompt: [...first, ...tokens.slice(total - read + first.length).map((token) => token.id)],
    max_tokens,
    read,
    total,
  }
}

/** The same, where the tokens are asked for only if the text may be too long. */
export async function fitted(
  model: Model,
  text: string,
  length: number,
  rendered: boolean,
  signal?: AbortSignal,
): Promise<Fitted> {
  // No text has more tokens than bytes, but for one at its beginning.
  const bytes = new TextEncoder().encode(text).length
  if (model.context === null || bytes + length + 2 <= model.context)
    return { prompt: text, max_tokens: length, read: null, total: null }
  const end = last(text, MOST_CHARACTERS) // the server cuts no longer texts into tokens
  return fit(end, (await api.tokens({ model: model.id, text: end, rendered }, signal)).tokens, model.context, length)
}

/** Where the last n tokens begin in the text, about: for code that is shown. */
export function tail(text: string, tokens: Token[], n: number): string {
  if (n >= tokens.length) return text
  const characters = [...text]
  const lengths = tokens.slice(tokens.length - n).map((token) => (token.special ? 1 : [...token.text].length))
  return characters.slice(Math.max(0, characters.length - lengths.reduce((a, b) => a + b, 0))).join('')
}
