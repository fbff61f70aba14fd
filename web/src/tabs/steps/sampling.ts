// From logits to a token: temperature, top-k, top-p and a draw, as the server does it, in the browser.

import type { Steps, Token } from '../../lib/api'
import { softmax } from '../../lib/arrays'

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

/** All tokens, likeliest first. */
export function candidates(
  { logits, vocabulary }: Pick<Steps, 'logits' | 'vocabulary'>,
  { temperature, topK, topP }: How,
): Candidate[] {
  const greedy = temperature <= 0
  const order = logits.map((_, i) => i).sort((a, b) => logits[b] - logits[a] || a - b)
  // Top-k comes before top-p, whose mass is that of what is left.
  const kept = topK > 0 ? Math.min(topK, order.length) : order.length
  const whole = softmax(logits, greedy ? 1 : temperature)
  let mass = 0
  for (const i of order.slice(0, kept)) mass += whole[i]
  let before = 0
  const found: Candidate[] = order.map((i, rank) => {
    const part = whole[i] / mass
    const cut = greedy ? (rank > 0 ? 'top-k' : '') : rank >= kept ? 'top-k' : rank > 0 && before >= topP ? 'top-p' : ''
    before += rank < kept ? part : 0
    return {
      token: vocabulary[i],
      logit: logits[i],
      scaled: greedy ? logits[i] : logits[i] / temperature,
      probability: whole[i],
      cut,
      share: 0,
    }
  })
  const left = found.reduce((total, one) => total + (one.cut ? 0 : one.probability), 0)
  for (const one of found) one.share = one.cut ? 0 : one.probability / left
  return found
}

/** The one in whose part of the line from 0 to 1 a number lies. */
export function chosen(all: Candidate[], draw: number): number {
  let end = 0
  for (let i = 0; i < all.length; i++) {
    end += all[i].share
    if (draw < end) return i
  }
  return Math.max(
    0,
    all.findLastIndex((one) => one.share > 0),
  )
}
