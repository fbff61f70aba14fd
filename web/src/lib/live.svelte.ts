// A question that is asked again whenever what it depends on changes: debounced, and with stale answers thrown away.

import { untrack } from 'svelte'
import { aborted, ApiError } from './api'

export class Live<Reply> {
  /** The newest good answer; it stays while the next one of the same model is under way. */
  value = $state.raw<Reply | null>(null)
  error = $state.raw<ApiError | null>(null)
  loading = $state(false)
  tries = $state(0)

  /** Ask again. */
  retry = (): void => void this.tries++
}

/**
 * Ask `call(ask())` now, and again `delay` milliseconds after what `ask` reads has changed. Where `ask` returns null,
 * nothing is asked and the value is null. To be called while a component is made.
 *
 *     const answer = live(() => page.model && { model: page.model.id, text: page.text }, api.tokens)
 *     {#if answer.value} ... {/if}
 */
export function live<Ask, Reply>(
  ask: () => Ask | null,
  call: (ask: Ask, signal: AbortSignal) => Promise<Reply>,
  delay = 150,
): Live<Reply> {
  const answer = new Live<Reply>()
  let last: string | undefined
  let model: unknown
  $effect(() => {
    const wanted = ask()
    const asked = JSON.stringify([wanted, answer.tries])
    if (wanted === null) {
      last = model = undefined
      untrack(() => Object.assign(answer, { value: null, error: null, loading: false }))
      return
    }
    const first = last === undefined
    last = asked
    const other = (wanted as { model?: unknown }).model
    if (model !== undefined && model !== other) untrack(() => (answer.value = null))
    model = other
    const control = new AbortController()
    untrack(() => (answer.loading = true))
    const timer = setTimeout(
      async () => {
        try {
          const value = await call(wanted, control.signal)
          if (!control.signal.aborted) Object.assign(answer, { value, error: null, loading: false })
        } catch (problem) {
          if (control.signal.aborted || aborted(problem)) return
          const error = problem instanceof ApiError ? problem : new ApiError(String(problem), 0)
          Object.assign(answer, { error, loading: false })
        }
      },
      first ? 0 : delay,
    )
    return () => {
      clearTimeout(timer)
      control.abort()
    }
  })
  return answer
}
