// What the views of the attention tab share: their settings, what is asked of the server, and the weights of the layer.
// To be made while a component is made.

import { api, type Token, type Which } from '../../lib/api'
import { live } from '../../lib/live.svelte'
import { page, settings } from '../../lib/state.svelte'
import type { Scene, Side } from './lines'

const range = (n: number): number[] => Array.from({ length: n }, (_, i) => i)
const clamped = (x: number, end: number): number => Math.min(Math.max(Math.trunc(x), 0), end - 1)
const sameTokens = (a: Token[], b: Token[]): boolean =>
  a.length === b.length && a.every(({ id, text }, i) => id === b[i].id && text === b[i].text)

export class AttentionState {
  readonly own = settings('attention', {
    view: 'heads',
    which: '', // the most telling kind that the model has
    layer: -1, // the telling one that the model's card names, or the last
    all: false as boolean, // layers at once, in an alignment
    off: [] as number[], // heads
    head: -1, // of the neuron view: the telling one, or the first
    token: -1,
    side: 'from',
    masked: [] as number[],
    plain: false as boolean, // without special tokens
    top: 100,
    sorted: false as boolean,
    target: '',
  })
  readonly model = $derived(page.model!)
  /** Whether it is an encoder-decoder, which writes an answer. */
  readonly writes = $derived(this.model.kind === 'encoder-decoder' || this.model.kind === 'recurrent')
  readonly kinds = $derived(Object.keys(this.model.attention_layers) as Which[])
  readonly which = $derived(this.kinds.find((kind) => kind === this.own.which) ?? this.kinds[this.kinds.length - 1])
  readonly views = $derived([
    { value: 'heads', label: 'Heads', title: 'Lines between tokens, by head' },
    { value: 'model', label: 'Model', title: 'Every head of every layer' },
    { value: 'neuron', label: 'Neurons', title: 'How a query finds its keys' },
    { value: 'matrix', label: this.which === 'cross' ? 'Alignment' : 'Matrix', title: 'Who looks at whom' },
    ...(this.which === 'cross'
      ? []
      : [{ value: 'rollout', label: 'Rollout', title: 'What has come to each token through all layers' }]),
  ])
  readonly view = $derived(this.views.some(({ value }) => value === this.own.view) ? this.own.view : 'heads')
  readonly masked = $derived(this.own.masked.filter((x) => Number.isInteger(x) && x >= 0).sort((a, b) => a - b))

  // --- what is asked ---------------------------------------------------------------------------------------------
  /** The text and the target, once nothing has been typed for a moment. */
  text = $state(page.text)
  target = $state('')
  readonly layers = $derived(this.model.attention_layers[this.which] ?? 1)
  /** The head to begin with, of the kind of attention to begin with: until another layer or other heads are chosen. */
  readonly telling = $derived(
    this.own.layer < 0 &&
      !this.own.off.length &&
      this.view !== 'rollout' &&
      this.which === this.kinds[this.kinds.length - 1]
      ? this.model.telling
      : null,
  )
  readonly layer = $derived(
    clamped(this.own.layer < 0 ? (this.telling?.layer ?? this.layers - 1) : this.own.layer, this.layers),
  )
  readonly blank = $derived(this.text.trim() === '')
  readonly request = $derived({
    model: this.model.id,
    text: this.text,
    ...(this.writes && this.target.trim() ? { target: this.target } : {}),
    which: this.which,
    masked: this.masked,
    ...(page.rendered ? { rendered: true } : {}),
  })
  /** The weights of the layer; the rollout needs none. */
  readonly map = live(
    () => (this.blank || this.view === 'rollout' ? null : { ...this.request, layer: this.layer }),
    api.attention,
    0,
  )

  // --- what is seen ----------------------------------------------------------------------------------------------
  // Another layer has the same tokens: what is made of them is not made again.
  #from: Token[] = []
  #to: Token[] = []
  readonly from = $derived.by(() => {
    const { from = [], hidden = [] } = this.map.value ?? {}
    const now = this.which === 'cross' ? from : this.unmasked(from, hidden)
    return sameTokens(this.#from, now) ? this.#from : (this.#from = now)
  })
  readonly to = $derived.by(() => {
    const { to = [], hidden = [] } = this.map.value ?? {}
    const now = this.unmasked(to, hidden)
    return sameTokens(this.#to, now) ? this.#to : (this.#to = now)
  })
  readonly heads = $derived(this.map.value?.n_heads ?? Math.max(this.model.n_heads, 1))
  readonly on = $derived(
    this.telling && this.view !== 'model'
      ? [clamped(this.telling.head, this.heads)]
      : range(this.heads).filter((i) => !this.own.off.includes(i)),
  )
  readonly head = $derived(clamped(this.own.head < 0 ? (this.telling?.head ?? 0) : this.own.head, this.heads))
  /** The token whose query the neuron view shows. */
  readonly query = $derived(
    this.own.side === 'from' && this.own.token >= 0 && this.own.token < this.from.length
      ? this.own.token
      : Math.max(this.from.length - 1, 0),
  )
  /** All layers of an alignment at once. */
  readonly together = $derived(this.view === 'matrix' && this.which === 'cross' && this.own.all && this.layers > 1)
  readonly pinned = $derived(
    this.own.token >= 0 ? { side: (this.own.side === 'to' ? 'to' : 'from') as Side, token: this.own.token } : null,
  )
  readonly titles = $derived(
    this.which === 'cross' ? { from: 'written', to: 'read' } : { from: 'who looks', to: 'at what' },
  )
  // By themselves, so that what depends on the tokens alone stays when heads come and go.
  readonly #shown = $derived({ from: this.seen(this.from), to: this.seen(this.to) })
  /** The tokens of the rollout, which come with it. */
  rolled = $state.raw<Token[]>([])
  /** A head whose square is under the pointer. */
  tried = $state<number | null>(null)

  constructor() {
    this.target = this.own.target
    this.#settleTyping()
    this.#dropMasks()
  }

  /** Typing is waited for; a click is answered at once. */
  #settleTyping(): void {
    let read = page.model?.id
    $effect(() => {
      const now = [page.text, this.own.target] as const
      const settle = () => ([this.text, this.target] = now)
      if (read !== this.model.id) {
        read = this.model.id
        settle()
        return
      }
      const timer = setTimeout(settle, 150)
      return () => clearTimeout(timer)
    })
  }

  /** Masks are places in a text: another text has none, unless they came together with it, by a link. */
  #dropMasks(): void {
    let before: string[] = []
    $effect(() => {
      const now = [
        JSON.stringify([this.model.id, page.text, this.which, this.own.target]),
        JSON.stringify(this.own.masked),
      ]
      if (before.length && now[0] !== before[0] && now[1] === before[1] && this.own.masked.length) this.own.masked = []
      before = now
    })
  }

  /** Tokens with the masked ones as they were written, whatever the model reads there. */
  unmasked(tokens: Token[], hidden: Token[]): Token[] {
    return hidden.length ? tokens.map((token, i) => hidden[this.masked.indexOf(i)] ?? token) : tokens
  }

  /** The tokens that are shown, by their places. */
  seen(tokens: Token[]): number[] {
    return tokens.flatMap((token, i) => (this.own.plain && token.special ? [] : [i]))
  }

  /** What is drawn of the layer's weights. */
  scene(floors: Scene['floors']): Scene | null {
    return this.map.value && { weights: this.map.value.weights, heads: this.on, ...this.#shown, floors }
  }

  /** The part of each token's attention that is shown. */
  get share(): number {
    return Math.min(Math.max(this.own.top, 1), 100) / 100
  }

  mask = (token: number): void => {
    this.own.masked = this.masked.includes(token)
      ? this.masked.filter((other) => other !== token)
      : [...this.masked, token].sort((a, b) => a - b)
  }
  toLayer = (value: number): void => {
    this.own.all = value < 0
    if (value >= 0) this.own.layer = value
  }
  showHeads = (shown: number[]): void => {
    this.own.layer = this.layer // which is chosen now
    if (this.view === 'neuron') this.own.head = shown[0]
    else this.own.off = range(this.heads).filter((i) => !shown.includes(i))
  }
  open = (layer: number, head: number): void => {
    Object.assign(this.own, { layer, head, view: 'heads', off: range(this.heads).filter((i) => i !== head) })
  }
}
