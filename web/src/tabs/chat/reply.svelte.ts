// The reply that is being written: streamed into its message, with the probabilities of its tokens.

import { SvelteMap } from 'svelte/reactivity'
import { aborted, api, ApiError, type ChatLogprob, type Model, type ToolCall, type ToolCallDelta } from '../../lib/api'
import { Waiting } from '../../lib/waiting.svelte'
import { echoed, type Piece } from '../complete/pieces'
import type { Asked } from './boxes'
import { kept } from './kept.svelte'
import { add, messages, path, promptOf, type Talk } from './talk'

/** How to answer, in the words of /v1/chat/completions. */
export interface How extends Asked {
  max_tokens: number
  temperature: number
  top_p?: number
  seed?: number
}
/** What to write: an answer to a message, from a beginning if there is one. */
export interface Wish {
  model: Model
  talk: Talk
  /** The message to answer. */
  after: number
  how: How
  begun?: string
  pieces?: Piece[]
  /** Of a conversation that is too long, read the end. */
  end?: boolean
}

const EVERY = 40 // milliseconds between two looks at what has come
const REMEMBERED = 200 // replies with their probabilities

/** The tokens of an answer as they come in. */
export class Tokens {
  pieces: Piece[]
  #decoder = new TextDecoder()

  constructor(begun: Piece[] = []) {
    this.pieces = [...begun]
  }

  take(entries: ChatLogprob[]): void {
    for (const entry of entries)
      this.pieces.push({
        text: entry.bytes ? this.#decoder.decode(new Uint8Array(entry.bytes), { stream: true }) : '',
        token: nameOf(entry),
        probability: Math.exp(entry.logprob),
        top: entry.top_logprobs.map((one) => ({ text: nameOf(one), probability: Math.exp(one.logprob) })),
      })
  }
}

/** Add what has come of calls to what there was. */
export function takeCalls(calls: ToolCall[], deltas: ToolCallDelta[]): void {
  for (const { index, id, function: called } of deltas) {
    const call = (calls[index] ??= { id: '', type: 'function', function: { name: '', arguments: '' } })
    call.id ||= id ?? ''
    call.function.name += called?.name ?? ''
    call.function.arguments += called?.arguments ?? ''
  }
}

/** A token as Complete calls it: "bytes:..." for a part of a character. */
function nameOf({ token, bytes }: Pick<ChatLogprob, 'token' | 'bytes'>): string {
  const whole = bytes === null || new TextDecoder().decode(new Uint8Array(bytes)) === token
  return whole ? token : `bytes:${token}`
}

/** The probabilities of a message that is there already: the model reads it with all that stands before. */
export async function score({ model, talk, index }: Message, signal: AbortSignal): Promise<void> {
  const { content, parent } = talk.turns[index]
  const prompt = await api.chatPrompt({ model, ...promptOf(talk, parent) }, signal)
  const whole = await api.chatPrompt({ model, ...promptOf(talk, index), continue_final_message: true }, signal)
  const ids = whole.tokens.map((token) => token.id)
  const { choices } = await api.complete({ model, prompt: ids, max_tokens: 0, logprobs: 5, echo: true }, signal)
  const pieces = echoed(whole.text, choices[0].text, choices[0].logprobs!)
  let at = 0
  const own = pieces.filter((piece) => (at += piece.text.length) > prompt.text.length)
  if (own.map((piece) => piece.text).join('') === content) reply.remember(talk, index, own)
}

export interface Message {
  model: string
  talk: Talk
  index: number
}

class Reply {
  /** Where it is written; null: nothing is. */
  now = $state.raw<{ talk: Talk; index: number } | null>(null)
  /** Nothing of it has come yet. */
  waiting = $state(false)
  error = $state.raw<{ wish: Wish; problem: ApiError } | null>(null)
  note = $state('')
  loading = new Waiting()
  #control: AbortController | null = null
  #known = new SvelteMap<string, Piece[]>()

  get running(): boolean {
    return this.now !== null
  }

  /** The tokens of a message, if they are known. */
  pieces(talk: Talk, index: number): Piece[] | null {
    const found = this.#known.get(keyOf(talk, index))
    return found && found.map((piece) => piece.text).join('') === talk.turns[index].content ? found : null
  }

  remember(talk: Talk, index: number, pieces: Piece[]): void {
    this.#known.set(keyOf(talk, index), pieces)
    if (this.#known.size > REMEMBERED) this.#known.delete(this.#known.keys().next().value!)
  }

  stop(): void {
    this.#control?.abort()
  }

  async write(wish: Wish): Promise<void> {
    if (this.now) return
    const { model, talk, after, how, begun = '', end = false } = wish
    const control = (this.#control = new AbortController())
    const sent = messages(talk, after)
    const asked = { ...how }
    if (begun) delete asked.response_format // it holds from a reply's beginning
    if (begun || sent.at(-1)?.role !== 'user') delete asked.tool_choice // a tool's result need not be followed by a call
    const index = add(talk, {
      role: 'assistant',
      content: begun,
      parent: after,
      by: model.id,
      ...(asked.response_format && { json: true }),
    })
    const turn = talk.turns[index]
    const tokens = new Tokens(wish.pieces)
    const calls: ToolCall[] = []
    let text = begun
    const tell = (): void => {
      turn.content = text
      if (calls.length) turn.tool_calls = structuredClone(calls)
      this.remember(talk, index, [...tokens.pieces])
    }
    Object.assign(this, { now: { talk, index }, waiting: true, error: null, note: '' })
    const timer = setInterval(tell, EVERY)
    this.loading.begin(model.id)
    try {
      const body = {
        ...asked,
        model: model.id,
        messages: begun ? [...sent, { role: 'assistant' as const, content: begun }] : sent,
        continue_final_message: begun !== '',
        logprobs: true,
        top_logprobs: 5,
        ...(end ? { truncate_prompt_tokens: -1 } : {}),
      }
      for await (const { choices } of api.chat(body, control.signal)) {
        this.loading.end()
        const [choice] = choices
        if (!choice) continue
        if (choice.delta.content) {
          text += choice.delta.content
          this.waiting = false
        }
        if (choice.delta.tool_calls) {
          takeCalls(calls, choice.delta.tool_calls)
          this.waiting = false
        }
        tokens.take(choice.logprobs?.content ?? [])
        if (choice.finish_reason) turn.end = choice.finish_reason
      }
      if (end) this.note = `The conversation is longer than ${model.id} reads at once: it read the end of it.`
    } catch (problem) {
      turn.end = 'stopped'
      if (!control.signal.aborted && !aborted(problem)) {
        turn.end = 'failed'
        this.error = { wish, problem: problem instanceof ApiError ? problem : new ApiError(String(problem), 0) }
      }
    }
    clearInterval(timer)
    this.loading.end()
    tell()
    this.#end(talk, index)
  }

  #end(talk: Talk, index: number): void {
    const turn = talk.turns[index]
    if (turn.content === '' && !turn.tool_calls && turn.end !== 'stop' && turn.end !== 'length') {
      // nothing came: there is no reply
      if (path(talk).includes(index)) talk.leaf = turn.parent
      if (index === talk.turns.length - 1) talk.turns.pop()
    }
    talk.changed = Date.now()
    kept.keep(talk)
    this.now = null
    this.waiting = false
  }
}

const keyOf = (talk: Talk, index: number): string => `${talk.id}:${index}`

export const reply = new Reply()
