// Tokens with their probabilities, as /v1/completions tells of them, put to the text they are a part of.

import type { Choice, CompletionLogprobs } from '../../lib/api'

export interface Alternative {
  text: string
  probability: number
}
export interface Piece {
  /** Its part of the text: nothing, for one that is only a part of a character, or the end. */
  text: string
  /** The token as it is called: "bytes:\xe2" for a part of a character. */
  token: string
  /** Null: the model was not asked, or could not say, as of the first one of a text. */
  probability: number | null
  /** The likeliest tokens at this place, itself among them; the likeliest first. */
  top: Alternative[]
}

type Entry = Omit<Piece, 'text'>

function entries({ tokens, token_logprobs, top_logprobs }: CompletionLogprobs): Entry[] {
  return tokens.map((token, i) => ({
    token,
    probability: token_logprobs[i] === null ? null : Math.exp(token_logprobs[i]!),
    top: Object.entries(top_logprobs?.[i] ?? {})
      .map(([text, logprob]) => ({ text, probability: Math.exp(logprob) }))
      .sort((a, b) => b.probability - a.probability),
  }))
}

export const unknown = (text: string): Piece => ({ text, token: text, probability: null, top: [] })

/** The pieces of an answer as it comes in. Places are counted in characters, which a string's own length does not. */
export class Gathered {
  pieces: Piece[] = []
  /** `written`: characters of the answer that came before, such as the echo of the prompt. */
  constructor(private written = 0) {}

  take(choice: Choice): void {
    const characters = [...choice.text]
    const places = (choice.logprobs?.text_offset ?? []).map((place) => Math.max(0, place - this.written))
    const before = characters.slice(0, places[0] ?? characters.length).join('')
    const last = this.pieces.at(-1)
    if (before && last) this.pieces[this.pieces.length - 1] = { ...last, text: last.text + before }
    else if (before) this.pieces.push(unknown(before))
    if (choice.logprobs) {
      const fresh = entries(choice.logprobs).map((entry, i) => ({
        ...entry,
        text: characters.slice(places[i], places[i + 1]).join(''),
      }))
      this.pieces.push(...fresh)
    }
    this.written += characters.length
  }
}

/** The echo of a prompt put to the text that was sent: what the model has no token for is not in the echo. */
export function echoed(text: string, said: string, logprobs: CompletionLogprobs): Piece[] {
  const n = [...said].length
  if (text.endsWith(said)) {
    const gathered = new Gathered()
    const inside = logprobs.text_offset.filter((place) => place < n).length
    gathered.take({
      index: 0,
      text: said,
      finish_reason: null,
      logprobs: inside === logprobs.tokens.length ? logprobs : first(logprobs, inside),
    })
    const head = text.slice(0, text.length - said.length) // was not read
    return head ? [unknown(head), ...gathered.pieces] : gathered.pieces
  }
  return aligned(text, entries(logprobs))
}

function first(all: CompletionLogprobs, n: number): CompletionLogprobs {
  const { tokens, token_logprobs, top_logprobs, text_offset } = all
  return {
    tokens: tokens.slice(0, n),
    token_logprobs: token_logprobs.slice(0, n),
    top_logprobs: top_logprobs?.slice(0, n) ?? null,
    text_offset: text_offset.slice(0, n),
  }
}

/** Tokens along a text; one that is not found there stands for one character. */
function aligned(text: string, tokens: Entry[]): Piece[] {
  const found: Piece[] = []
  let at = 0
  for (const entry of tokens) {
    const part = text.startsWith(entry.token, at) ? entry.token : String.fromCodePoint(text.codePointAt(at) ?? 32)
    found.push({ ...entry, text: text.slice(at, at + part.length) })
    at = Math.min(text.length, at + part.length)
  }
  return at < text.length ? [...found, unknown(text.slice(at))] : found
}

/** Whether a text can go on with this token: not with a part of a character, nor with the end. */
export const sayable = (token: string): boolean =>
  !/^(bytes:|token_id:)|^<\|[^|]*\|>$|^<\/?[a-z_]+>$|^\[[A-Z]+\]$/.test(token)

/** The probability of a token on average: exp of the mean log-probability. Null where none is known. */
export function perToken(pieces: Piece[] | null): number | null {
  const known = (pieces ?? []).filter((piece) => piece.probability !== null)
  if (!known.length) return null
  return Math.exp(known.reduce((sum, piece) => sum + Math.log(Math.max(piece.probability!, 1e-300)), 0) / known.length)
}

/** 0 for what was sure, 1 for one in a thousand and less. */
export const surprise = (probability: number): number =>
  Math.min(1, Math.max(0, -Math.log10(Math.max(probability, 1e-12)) / 3))
