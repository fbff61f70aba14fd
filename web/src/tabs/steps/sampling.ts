// From logits to a token: temperature, top-k, top-p and a draw, as the server does it, in the browser.

import type { Token } from '../../lib/api'

export interface How {
  temperature: number
  topK: number // 0: off
  topP: number // 1: off
}

export interface Candidate {
  token: Token
  logit: number
  /** The logit over the temperature. */
  scaled: number
  probability: number
  /** Why it cannot be chosen; empty if it can. */
  cut: '' | 'top-k' | 'top-p'
  /** The probability among those that can. */
  share: number
}

/** The tokens of `named`, likeliest first; the probabilities are among all that have a logit. */
export function candidates(
  { logits, named }: { logits: ArrayLike<number>; named: Token[] },
  { temperature, topK, topP }: How,
): Candidate[] {
  const greedy = temperature <= 0
  const heat = greedy ? 1 : temperature
  let [most, sum] = [-Infinity, 0]
  for (let i = 0; i < logits.length; i++) most = Math.max(most, logits[i])
  for (let i = 0; i < logits.length; i++) sum += Math.exp((logits[i] - most) / heat)
  const probability = ({ id }: Token) => Math.exp((logits[id] - most) / heat) / sum
  // Top-k comes before top-p, whose mass is that of what is left.
  const kept = topK > 0 ? Math.min(topK, named.length) : logits.length
  const mass = kept > named.length ? 1 : named.slice(0, kept).reduce((total, token) => total + probability(token), 0)
  let before = 0
  const found: Candidate[] = named.map((token, rank) => {
    const own = probability(token)
    const cut = greedy ? (rank > 0 ? 'top-k' : '') : rank >= kept ? 'top-k' : rank > 0 && before >= topP ? 'top-p' : ''
    before += rank < kept ? own / mass : 0
    const logit = logits[token.id]
    return { token, logit, scaled: logit / heat, probability: own, cut, share: 0 }
  })
  const open = found.reduce((total, one) => total + (one.cut ? 0 : one.probability), 0)
  const rarer = kept > named.length && before < topP ? Math.max(0, 1 - before) : 0 // without names
  for (const one of found) one.share = one.cut ? 0 : one.probability / (open + (greedy ? 0 : rarer))
  return found
}

/** The one in whose part of the line from 0 to 1 a number lies; those without names have no part. */
export function chosen(all: Candidate[], draw: number): number {
  const whole = all.reduce((total, one) => total + one.share, 0)
  let end = 0
  for (let i = 0; i < all.length; i++) {
    end += all[i].share / whole
    if (draw < end) return i
  }
  return Math.max(
    0,
    all.findLastIndex((one) => one.share > 0),
  )
}
