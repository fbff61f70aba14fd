// What is being written: the branches, the answers that stream into some of them, and all probabilities known so far.

import { aborted, api, ApiError, type Choice, type Model } from '../../lib/api'
import { page } from '../../lib/state.svelte'
import { Waiting } from '../../lib/waiting.svelte'
import { fitted, readAs } from '../write/prompt'
import { nothingCame } from './how'
import { restore, told } from './link'
import { echoed, Gathered, type Alternative, type Piece } from './pieces'
import { Tree, type Branch } from './tree.svelte'

/** How to write, in the words of /v1/completions. */
export interface How {
  max_tokens: number
  n: number
  temperature: number
  top_p?: number
  top_k?: number
  frequency_penalty?: number
  presence_penalty?: number
  stop?: string[]
  seed?: number
}

const REMEMBERED = 100 // texts with their probabilities
const EVERY = 40 // milliseconds between two looks at what has come

/** One answer on its way into a branch, which is told of it now and then. */
class Answer {
  #gathered = new Gathered()
  #text = ''
  #told = true
  #echo: boolean

  constructor(
    readonly branch: Branch,
    private first: Piece[],
    echo: boolean,
  ) {
    this.#echo = echo
  }

  /** Take what came; whether it was the echo of the prompt, which comes before the answer. */
  take(choice: Choice): boolean {
    if (this.#echo) {
      this.#echo = false
      this.#gathered = new Gathered([...choice.text].length)
      return true
    }
    this.#text += choice.text
    this.#gathered.take(choice)
    this.#told = false
    return false
  }

  tell(): void {
    if (this.#told) return
    this.branch.text = this.first.map((piece) => piece.text).join('') + this.#text
    this.branch.pieces = [...this.first, ...this.#gathered.pieces]
    this.#told = true
  }
}

/** A request under way. */
class Writing {
  readonly control = new AbortController()
  /** Probabilities of what stands before the answers. */
  base = $state.raw<Piece[] | null>(null)
  timer: ReturnType<typeof setInterval>

  constructor(
    readonly model: Model,
    readonly before: string,
    base: Piece[] | null,
    readonly answers: Answer[],
    readonly stop: string[],
  ) {
    this.base = base
    this.timer = setInterval(() => this.answers.forEach((answer) => answer.tell()), EVERY)
  }
}

class Session {
  tree = new Tree()
  error = $state.raw<ApiError | null>(null)
  note = $state('')
  waiting = new Waiting()
  #now = $state.raw<Writing | null>(null)
  #version = $state(0) // of what is remembered
  #known = new Map<string, Piece[]>()
  #linked = '' // what the address says of the tree

  get running(): boolean {
    return this.#now !== null
  }

  /** The text, also while it grows: then the address is not told of each letter. */
  get text(): string {
    return this.#now ? this.tree.textOf(this.tree.current) : page.text
  }

  set text(value: string) {
    if (!this.#now) page.text = value
  }

  /** All that is known of the text on the screen; null: ask for it. */
  pieces(model: Model): Piece[] | null {
    void this.#version
    const { current } = this.tree
    if (!this.#now?.answers.some(({ branch }) => branch === current))
      return this.#known.get(keyOf(model, this.text)) ?? null
    return this.#now.base && [...this.#now.base, ...(current.pieces ?? [])]
  }

  /** The parts of the text that models wrote. */
  get marks(): { start: number; end: number }[] {
    if (!this.#now && this.tree.textOf(this.tree.current) !== page.text) return []
    let at = 0
    return this.tree.path(this.tree.current).flatMap(({ by, text }) => {
      at += text.length
      return by === null ? [] : [{ start: at - text.length, end: at }]
    })
  }

  /** Where the last answer began; null: the text does not end with one. */
  get before(): Branch | null {
    const { current } = this.tree
    return current.by !== null && this.text === this.tree.textOf(current) ? current.parent : null
  }

  /** Go to a branch: the text becomes that from the root to its end. */
  show(branch: Branch): void {
    this.tree.current = branch
    this.error = null
    this.note = ''
    if (!this.#now) page.text = this.tree.textOf(branch)
  }

  /** What the address is to say of the tree; `whole`: nothing is left out. */
  link(): { text: string; whole: boolean } {
    const found = told(this.tree)
    this.#linked = found.text
    return found
  }

  /** The address says this of the tree, which another than this one may have been. */
  follow(link: string): void {
    if (link === this.#linked) return
    this.stop()
    this.#linked = link
    restore(this.tree, link)
  }

  remove(branch: Branch): void {
    this.stop()
    const shown = this.tree.textOf(this.tree.current) === page.text
    this.tree.remove(branch)
    if (shown) page.text = this.tree.textOf(this.tree.current)
  }

  /** Let the text go on; `scored`: the probabilities of what is there are wanted, too. */
  async generate(model: Model, how: How, scored: boolean): Promise<void> {
    if (this.#now || page.text === '') return
    const from = this.tree.place(page.text)
    await this.#write(model, from, how, scored, this.#known.get(keyOf(model, page.text)) ?? null)
  }

  /** Let it go on from another token at the i-th place. */
  async branch(model: Model, pieces: Piece[], index: number, chosen: Alternative, how: How): Promise<void> {
    this.stop()
    const before = pieces.slice(0, index)
    this.tree.current = this.tree.place(page.text)
    const from = this.tree.splitAt(
      this.tree.current,
      before.reduce((sum, piece) => sum + piece.text.length, 0),
    )
    const first = { ...chosen, token: chosen.text, top: pieces[index].top }
    await this.#write(model, from, { ...how, n: 1 }, true, before, [first])
  }

  /** No more; what has come stays. */
  stop(): void {
    if (this.#now) this.#end(this.#now)
  }

  remember(model: Model, text: string, pieces: Piece[]): void {
    this.#known.set(keyOf(model, text), pieces)
    if (this.#known.size > REMEMBERED) this.#known.delete(this.#known.keys().next().value!)
    this.#version++
  }

  async #write(
    model: Model,
    from: Branch,
    how: How,
    scored: boolean,
    base: Piece[] | null,
    first: Piece[] = [],
  ): Promise<void> {
    const begun = first.map((piece) => piece.text).join('')
    const before = this.tree.textOf(from)
    const echo = scored && base === null
    const answers = Array.from(
      { length: how.n },
      () => new Answer(this.tree.grow(from, model.id, begun, first), first, echo),
    )
    const writing = new Writing(model, before, base, answers, how.stop ?? [])
    this.tree.current = answers[0].branch
    this.#now = writing
    this.error = null
    this.note = ''
    this.waiting.begin(model.id)
    try {
      const { prompt, max_tokens, read, total } = await fitted(
        model,
        before + begun,
        how.max_tokens,
        page.rendered,
        writing.control.signal,
      )
      if (read !== total)
        this.note = `${model.id} reads ${model.context} tokens at once: of the ${total} before the answer it read the last ${read}.`
      const body = { ...how, model: model.id, prompt, max_tokens, logprobs: 5, echo, ...readAs(page.rendered) }
      for await (const { choices } of api.streamed(body, writing.control.signal)) {
        this.waiting.end()
        for (const choice of choices) {
          if (answers[choice.index].take(choice) && choice.logprobs)
            writing.base ??= echoed(before, choice.text, choice.logprobs)
        }
      }
    } catch (problem) {
      if (writing.control.signal.aborted || aborted(problem)) return
      this.error = problem instanceof ApiError ? problem : new ApiError(String(problem), 0)
    }
    this.#end(writing)
  }

  #end(writing: Writing): void {
    if (this.#now !== writing) return
    clearInterval(writing.timer)
    this.waiting.end()
    for (const answer of writing.answers) answer.tell()
    this.#now = null
    const shown = this.tree.current
    for (const { branch } of writing.answers) {
      if (branch.text === '') {
        if (branch === shown && !this.error && !writing.control.signal.aborted)
          this.note = nothingCame(writing.model.id, writing.stop)
        this.tree.remove(branch)
      } else if (writing.base)
        this.remember(writing.model, writing.before + branch.text, [...writing.base, ...(branch.pieces ?? [])])
    }
    writing.control.abort()
    page.text = this.tree.textOf(this.tree.current)
  }
}

export const session = new Session()

const keyOf = (model: Model, text: string): string => `${model.id}\n${page.rendered}\n${text}`

/** The probabilities of a whole text, or of as much of its end as the model can read. */
export async function score({ model, text }: { model: Model; text: string }, signal: AbortSignal): Promise<Piece[]> {
  const { prompt } = await fitted(model, text, 0, page.rendered, signal)
  const body = { model: model.id, prompt, max_tokens: 0, logprobs: 5, echo: true, ...readAs(page.rendered) }
  const { choices } = await api.complete(body, signal)
  const pieces = echoed(text, choices[0].text, choices[0].logprobs!)
  session.remember(model, text, pieces)
  return pieces
}
