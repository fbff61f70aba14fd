// Waiting for a model: one that has not answered for a moment may be being loaded, which takes seconds, and is said.

import { api } from './api'

const MOMENT = 400 // milliseconds

export class Waiting {
  /** The name of the model that is being loaded; null: none is, as far as is known. */
  cold = $state<string | null>(null)
  #timer: ReturnType<typeof setTimeout> | undefined
  #asked = 0

  /** A model was asked. */
  begin(id: string): void {
    this.end()
    const asked = this.#asked
    this.#timer = setTimeout(async () => {
      const found = await api.models().catch(() => null)
      const loaded = found?.models.find((model) => model.id === id)?.loaded
      if (asked === this.#asked && loaded === false) this.cold = id
    }, MOMENT)
  }

  /** It has answered, or nobody waits any more. */
  end(): void {
    clearTimeout(this.#timer)
    this.#asked++
    this.cold = null
  }

  /** What to say of it; empty if there is nothing to say. */
  get said(): string {
    return this.cold === null ? '' : `Loading ${this.cold}: its first answer takes some seconds.`
  }
}
