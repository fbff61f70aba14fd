// Continuations of a text, three at a time, written within a time budget: what is ready when it is over is shown.

import { aborted, api, ApiError, type Choice, type Model } from '../../lib/api'
import { Waiting } from '../../lib/waiting.svelte'
import { fitted, readAs } from './prompt'

export interface Wish {
  model: Model
  text: string
  rendered: boolean
  temperature: number
  top_p: number
  length: number
  seconds: number
}

const AT_ONCE = 3
const GRACE = 300 // milliseconds that are left to write, however long the model took to load or to read
const ROUNDS = 3 // of asking for what was said twice

/** One continuation, and how likely it is under the model itself: temperature 1, nothing cut. */
export class Suggestion {
  text = $state('')
  logprobs = $state.raw<number[]>([])
  done = $state(false)

  /** The probability of a token on average: the geometric mean, exp of the mean log-probability. */
  get perToken(): number {
    return this.logprobs.length ? Math.exp(this.sum / this.logprobs.length) : 0
  }
  /** The logarithm of the probability of all of it: of the product. */
  get sum(): number {
    return this.logprobs.reduce((a, b) => a + b, 0)
  }

  #tokens: { text: string; logprob: number }[] = []

  take(piece: Choice): void {
    const { tokens = [], token_logprobs = [] } = piece.logprobs ?? {}
    tokens.forEach((text, i) => this.#tokens.push({ text, logprob: token_logprobs[i] ?? 0 }))
    this.text += piece.text
    this.logprobs = this.#tokens.map((token) => token.logprob)
    if (piece.finish_reason === 'stop') this.done = true
  }

  /** Half a word at the end is left off, where time or length cut it. */
  finish(): void {
    const whole = /^([\s\S]*\S)\s+\S*$/.exec(this.text)?.[1]
    if (!this.done && whole) {
      let [kept, n] = ['', 0]
      while (n < this.#tokens.length && whole.startsWith(kept + this.#tokens[n].text)) kept += this.#tokens[n++].text
      if (kept === whole) {
        this.text = whole
        this.#tokens.length = n
        this.logprobs = this.#tokens.map((token) => token.logprob)
      }
    }
    this.done = true
  }
}

export class Suggestions {
  items = $state.raw<Suggestion[]>([])
  loading = $state(false)
  error = $state.raw<ApiError | null>(null)
  /** Tokens of the text that were read, where that is not all of them. */
  read = $state.raw<number | null>(null)
  waiting = new Waiting()
  #control: AbortController | null = null

  /** Three more. */
  async ask(wish: Wish): Promise<void> {
    if (this.loading) return
    const control = (this.#control = new AbortController())
    this.loading = true
    this.error = null
    const from = this.items.length
    const until = performance.now() + 1000 * wish.seconds
    try {
      for (let round = 0; round < ROUNDS && this.items.length < from + AT_ONCE; round++) {
        if (round && performance.now() > until) break
        await this.#write(wish, from + AT_ONCE - this.items.length, until, control)
        if (control.signal.aborted) return // dismissed meanwhile: what is there now belongs to another question
        this.#keepDifferent()
      }
    } catch (problem) {
      if (control.signal.aborted || aborted(problem)) return
      this.items = this.items.filter((item) => item.done)
      this.error = problem instanceof ApiError ? problem : new ApiError(String(problem), 0)
    }
    if (this.#control === control) this.loading = false
  }

  /** Forget them all, and stop writing. */
  clear(): void {
    this.#control?.abort()
    this.waiting.end()
    Object.assign(this, { items: [], loading: false, error: null })
  }

  async #write(wish: Wish, n: number, until: number, outer: AbortController): Promise<void> {
    const fresh = Array.from({ length: n }, () => new Suggestion())
    this.items = [...this.items, ...fresh]
    this.waiting.begin(wish.model.id)
    const { prompt, max_tokens, read, total } = await fitted(
      wish.model,
      wish.text,
      wish.length,
      wish.rendered,
      outer.signal,
    )
    if (outer.signal.aborted) return
    this.read = read !== null && total !== null && read < total ? read : null
    const inner = new AbortController()
    const stop = (): void => inner.abort()
    outer.signal.addEventListener('abort', stop)
    let timer: ReturnType<typeof setTimeout> | undefined
    try {
      const { temperature, top_p } = wish
      const how = { max_tokens, temperature, top_p, n, logprobs: 0, ...readAs(wish.rendered) }
      const body = { model: wish.model.id, prompt, ...how }
      for await (const piece of api.streamed(body, inner.signal)) {
        this.waiting.end()
        timer ??= setTimeout(stop, Math.max(until - performance.now(), GRACE))
        for (const choice of piece.choices) fresh[choice.index].take(choice)
      }
    } catch (problem) {
      if (outer.signal.aborted || !aborted(problem)) throw problem
    } finally {
      clearTimeout(timer)
      if (!outer.signal.aborted) this.waiting.end()
      outer.signal.removeEventListener('abort', stop)
    }
    for (const item of fresh) item.finish()
  }

  #keepDifferent(): void {
    this.items = this.items.filter(
      (item, i) => item.text !== '' && this.items.findIndex((other) => other.text === item.text) === i,
    )
  }
}
