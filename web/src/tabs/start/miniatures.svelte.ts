// The miniatures, computed one after the other, so that the page is there at once and whoever goes on waits for none.
// They are kept: who comes back sees them again.

import { aborted, type Model } from '../../lib/api'
import { cards, tooLarge, type Miniature } from './cards'

const computed = $state<Record<string, Miniature | 'none'>>({}) // by card and model; none: it could not be had

export const miniatureOf = (card: string, model: Model): Miniature | 'none' | null =>
  tooLarge(model) ? 'none' : (computed[`${card} ${model.id}`] ?? null)

/** Compute what is missing, until nobody waits for it any more. */
export async function compute(models: Model[], signal: AbortSignal): Promise<void> {
  for (const card of cards) {
    const model = card.model(models)
    if (signal.aborted) return
    if (!model || miniatureOf(card.id, model)) continue
    try {
      computed[`${card.id} ${model.id}`] = await card.compute(model, signal)
    } catch (problem) {
      if (signal.aborted || aborted(problem)) return
      computed[`${card.id} ${model.id}`] = 'none'
    }
  }
}
