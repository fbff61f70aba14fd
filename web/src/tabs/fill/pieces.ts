// Where each token stands in the text it was made from. Tokenizers change letters (lower case, accents, ▁ for a space),
// and the server gives no places; a token that cannot be found there has none, and is shown as a chip beside the text.

import type { Token } from '../../lib/api'

export interface Piece {
  index: number // of the token
  begin: number
  end: number
}

/** Letters without case and accents, as uncased models read them. Each character stays one. */
function folded(text: string): string {
  return [...text]
    .map((c) => {
      const base = c.normalize('NFD').replace(/\p{M}/gu, '').toLowerCase()
      return base.length === c.length ? base : c
    })
    .join('')
}

/** A token's text with the blanks that are shown as signs. */
export const unseen = (text: string): string =>
  /^[␣⏎⇥]+$/.test(text) ? text.replaceAll('␣', ' ').replaceAll('⏎', '\n').replaceAll('⇥', '\t') : text

/** The places of all tokens that are no special ones, or null where one cannot be found in its order. */
export function place(text: string, tokens: Token[]): Piece[] | null {
  const within = folded(text)
  const found: Piece[] = []
  let at = 0
  for (const [index, token] of tokens.entries()) {
    if (token.special) continue
    const raw = unseen(token.text).replace(/^##/, '')
    let piece = folded(raw)
    if (piece.startsWith(' ') && !within.startsWith(piece, at)) piece = piece.trimStart() // a space that the tokenizer added
    if (!piece) continue
    while (at < within.length && /\s/.test(within[at]) && !within.startsWith(piece, at)) at++
    if (!within.startsWith(piece, at)) return null
    const space = piece.length - piece.trimStart().length
    found.push({ index, begin: space < piece.length ? at + space : at, end: at + piece.length })
    at += piece.length
  }
  return found
}

/** The token that is the blank first: the last one that is a word, or else the last. */
export function usualBlank(tokens: Token[]): number {
  const ordinary = tokens.flatMap((token, i) => (token.special ? [] : [i]))
  const words = ordinary.filter((i) => /[\p{L}\p{N}]/u.test(tokens[i].text) && !tokens[i].raw.startsWith('##'))
  return words.at(-1) ?? ordinary.at(-1) ?? -1
}
