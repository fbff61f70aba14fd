// The server's JSON, typed. Every call takes an AbortSignal last, and fails with an ApiError that can be shown.

import { ARRAYS, unpack, type Bytes, type Numbers } from './arrays'
import { events } from './sse'

export interface Token {
  id: number
  text: string
  raw: string
  special: boolean
}
export interface Chance {
  token: Token
  probability: number
}
export interface Label {
  label: string
  probability: number
}
export type Kind = 'decoder' | 'encoder' | 'encoder-decoder' | 'recurrent' | 'image-classifier' | 'image-decoder'
export type Ability =
  | 'generate'
  | 'stream'
  | 'chat'
  | 'translate'
  | 'fill'
  | 'embed'
  | 'classify'
  | 'answer'
  | 'tag'
  | 'complete_image'
  | 'capture'

export interface Model {
  id: string
  family: string
  about: string
  kind: Kind
  abilities: Ability[]
  reads: 'text' | 'numbers' | 'image' // numbers: it has no tokenizer
  parameters: number
  n_layers: number
  n_heads: number
  context: number | null
  vocabulary: number
  chat: boolean
  image: { size: number; channels: number; levels: number } | null
  labels: string[] | null
  loaded: boolean
}

export type Which = 'self' | 'cross' | 'encoder'
export interface Attention {
  from: Token[] // queries: rows
  to: Token[] // keys: columns
  layer: number
  n_layers: number
  n_heads: number
  which: Which
  kinds: Which[]
  weights: Numbers // (heads, from, to)
  answer: string | null
}
export interface Overview {
  from: Token[]
  to: Token[]
  n_layers: number
  n_heads: number
  thumbnails: Bytes // (layers, heads, side, side)
}
export interface Neuron {
  tokens: Token[]
  query: number[]
  keys: Numbers // (T, D)
  products: Numbers // (T, D)
  scores: (number | null)[] // null where looking is not allowed
  weights: number[]
  scale: number
}
export interface Alignment {
  source: Token[]
  target: Token[]
  weights: Numbers // (layers, heads, target, source)
  text: string
}
export interface StepsLayer {
  residual_style: 'pre' | 'post' | 'parallel'
  scale: number
  softcap: number | null
  input: Numbers
  normed: Numbers | null // null, here and below: the family has none there
  q_raw: Numbers // (heads, T, D): the products, before norms and rotation
  k_raw: Numbers
  q_normed: Numbers | null
  k_normed: Numbers | null
  q: Numbers
  k: Numbers
  v: Numbers
  scores: Numbers // (heads, T, T)
  scaled: Numbers
  masked: Numbers
  weights: Numbers
  heads_out: Numbers
  concatenated: Numbers
  attention_out: Numbers
  attention_after: Numbers | null // normed before the sum
  summed: Numbers | null // of a block that norms after the sum, what it norms
  residual: Numbers | null
  normed2: Numbers | null
  hidden: Numbers | null
  gated: Numbers | null // what the activation is multiplied by
  activated: Numbers | null
  shares: Numbers | null // (T, experts)
  answers: Numbers | null // (experts, T, E)
  feedforward_out: Numbers
  feedforward_after: Numbers | null
  summed2: Numbers | null
  output: Numbers
}
export interface Steps {
  tokens: Token[]
  merges: { word: string; steps: string[][] }[] | null
  embeddings: Numbers
  positions: Numbers | null
  rotation: { cos: Numbers; sin: Numbers; layout: 'halves' | 'interleaved' } | null // (T, pairs)
  layers: StepsLayer[]
  final: Numbers
  logits: number[] // of the last position
  vocabulary: Token[]
}
/** A learned product: a matrix (outputs, inputs), and perhaps a bias. */
export interface Affine {
  weight: Numbers
  bias: Numbers | null
}
export interface LearnedNorm {
  kind: 'layer' | 'rms'
  gain: Numbers | null
  shift: Numbers | null
  eps: number
}
export interface StepsWeights {
  embedding: Numbers // (vocabulary, E)
  embedding_scale: number | null
  positions: Numbers | null
  layers: {
    attention_norm: LearnedNorm | null
    query: Affine
    key: Affine
    value: Affine
    query_norm: LearnedNorm | null
    key_norm: LearnedNorm | null
    output: Affine
    attention_after: LearnedNorm | null
    feedforward_norm: LearnedNorm | null
    act: string | null
    gate: Affine | null
    up: Affine | null
    down: Affine | null
    router: Affine | null
    feedforward_after: LearnedNorm | null
  }[]
  norm: LearnedNorm | null
  head: Affine & { scale: number | null; softcap: number | null }
}
export interface Run {
  name: string
  state: string
  step: number
  steps: number | null
  loss: number | null
  validation: number | null
  updated: number // seconds since 1970
}
export interface RunLog extends Run {
  lines: Record<string, unknown>[]
  next: number
  more: boolean // the log goes on after `next` already
  restarted: boolean // the run was cut: these lines are from its beginning
  baselines: Record<string, number | null>
  samples: { step: number; text: string }[]
  recipe: string
}
export interface CompletionLogprobs {
  tokens: string[]
  token_logprobs: (number | null)[]
  top_logprobs: (Record<string, number> | null)[]
  text_offset: number[]
}
export interface Choice {
  index: number
  text: string
  finish_reason: 'stop' | 'length' | null
  logprobs: CompletionLogprobs | null
}
export interface Completion {
  id: string
  model: string
  choices: Choice[]
  usage?: { prompt_tokens: number; completion_tokens: number; total_tokens: number } | null
}
export interface CompletionAsk {
  model: string
  prompt: string | string[] | number[] | number[][]
  max_tokens?: number
  temperature?: number
  top_p?: number
  n?: number
  logprobs?: number | null
  echo?: boolean
  seed?: number
  stop?: string[] | null
  frequency_penalty?: number
  presence_penalty?: number
  [more: string]: unknown // such as top_k, where the server has it
}

/** What went wrong, in words for the person at the page. */
export class ApiError extends Error {
  constructor(
    message: string,
    readonly status: number,
    readonly param: string | null = null,
    readonly code: string | null = null,
  ) {
    super(message)
  }
}

/** Whether a promise ended because nobody waits for it any more. */
export const aborted = (error: unknown): boolean => error instanceof DOMException && error.name === 'AbortError'

/** The API key of a server that asks for one; kept for as long as this browser tab is open. */
export const key = {
  get: (): string => sessionStorage.getItem('heedful-key') ?? '',
  set: (value: string): void => sessionStorage.setItem('heedful-key', value),
}
const listeners = new Set<() => void>()
/** Call this whenever the server asks for a key. */
export const onKeyWanted = (listener: () => void): void => void listeners.add(listener)

async function ask(path: string, body: unknown, signal?: AbortSignal): Promise<Response> {
  const headers: Record<string, string> = {
    accept: `${ARRAYS}, application/json`,
    ...(key.get() ? { authorization: `Bearer ${key.get()}` } : {}),
  }
  if (body !== undefined) headers['content-type'] = 'application/json'
  const request = {
    method: body === undefined ? 'GET' : 'POST',
    headers,
    body: body === undefined ? undefined : JSON.stringify(body),
    signal,
  }
  let response: Response
  try {
    response = await fetch(new URL(path, document.baseURI), request)
  } catch (problem) {
    if (aborted(problem)) throw problem
    throw new ApiError('The server does not answer. Is it still running?', 0)
  }
  if (response.ok) return response
  if (response.status === 401) for (const listener of listeners) listener()
  const said = await response.json().catch(() => null)
  const error = said?.error ?? {}
  throw new ApiError(
    sentence(error.message ?? `The server answered with ${response.status}.`),
    response.status,
    error.param,
    error.code,
  )
}

function sentence(text: string): string {
  const first = text.charAt(0).toUpperCase() + text.slice(1)
  return /[.!?]$/.test(first) ? first : first + '.'
}

async function read<Reply>(response: Response): Promise<Reply> {
  const packed = response.headers.get('content-type') === ARRAYS
  return (packed ? unpack(await response.arrayBuffer()) : await response.json()) as Reply
}

const get = async <Reply>(path: string, signal?: AbortSignal): Promise<Reply> =>
  read(await ask(path, undefined, signal))
const post = async <Reply>(path: string, body: unknown, signal?: AbortSignal): Promise<Reply> =>
  read(await ask(path, body, signal))

async function* stream<Event>(path: string, body: unknown, signal?: AbortSignal): AsyncGenerator<Event> {
  const response = await ask(path, body, signal)
  for await (const data of events(response.body!)) {
    if (data === '[DONE]') return
    const event = JSON.parse(data)
    if (event.error) throw new ApiError(sentence(event.error.message), 500, event.error.param, event.error.code)
    yield event as Event
  }
}

type Signal = AbortSignal | undefined
type Levels = number[][] // rows of an image, 0 to 1
type Looked = { model: string; text: string; target?: string; which: Which; masked?: number[] }

export const api = {
  models: (signal?: Signal) => get<{ models: Model[] }>('api/models', signal),
  tokens: (body: { model: string; text: string }, signal?: Signal) =>
    post<{ tokens: Token[] }>('api/tokens', body, signal),
  next: (body: { model: string; text: string; top_k?: number }, signal?: Signal) =>
    post<{ tokens: Token[]; next: Chance[] }>('api/next', body, signal),

  fill: (body: { model: string; texts?: string[]; template?: string; words?: string[]; n: number }, signal?: Signal) =>
    post<{
      sentences: { text: string; model: string; choices: string[] }[]
      words: string[]
      logprobs: Numbers
      note: string | null
    }>('api/fill', body, signal),
  fillToken: (body: { model: string; text: string; index: number }, signal?: Signal) =>
    post<{ tokens: Token[]; words: { word: string; probability: number }[] }>('api/fill/token', body, signal),

  attention: (body: Looked & { layer: number }, signal?: Signal) => post<Attention>('api/attention', body, signal),
  overview: (body: Looked, signal?: Signal) => post<Overview>('api/attention/overview', body, signal),
  neuron: (body: Looked & { layer: number; head: number; index: number }, signal?: Signal) =>
    post<Neuron>('api/attention/neuron', body, signal),
  alignment: (body: { model: string; source: string; target?: string; masked?: number[] }, signal?: Signal) =>
    post<Alignment>('api/alignment', body, signal),
  rollout: (
    body: {
      model: string
      text?: string
      target?: string
      image?: Levels
      which?: 'self' | 'encoder'
      masked?: number[]
    },
    signal?: Signal,
  ) => post<{ tokens?: Token[]; grid?: number[]; weights: Numbers }>('api/rollout', body, signal),
  lens: (body: { model: string; text: string; k?: number }, signal?: Signal) =>
    post<{ tokens: Token[]; layers: string[]; top: Chance[][][] }>('api/lens', body, signal),
  steps: (body: { model: string; text: string }, signal?: Signal) => post<Steps>('api/steps', body, signal),
  stepsWeights: (body: { model: string }, signal?: Signal) => post<StepsWeights>('api/steps/weights', body, signal),

  translate: (body: { model: string; text: string; beams?: number }, signal?: Signal) =>
    post<{ text: string; source: Token[]; target: Token[]; weights: Numbers | null }>('api/translate', body, signal),
  classify: (body: { model: string; text: string }, signal?: Signal) =>
    post<{ labels: Label[]; tokens: Token[] }>('api/classify', body, signal),
  answer: (body: { model: string; question: string; passage: string }, signal?: Signal) =>
    post<{ answers: { text: string; start: number; end: number; probability: number }[] }>('api/answer', body, signal),
  tag: (body: { model: string; text: string }, signal?: Signal) =>
    post<{ words: { text: string; start: number; end: number; label: string; probability: number }[] }>(
      'api/tag',
      body,
      signal,
    ),

  images: (signal?: Signal) => get<{ digits: { label: number; image: Levels }[] }>('api/images', signal),
  classifyImage: (body: { model: string; image: Levels }, signal?: Signal) =>
    post<{ labels: Label[]; grid: number[]; rollout: Numbers; weights: Numbers }>('api/image/classify', body, signal),
  completeImage: (
    body: { model: string; image: Levels; n_given: number; temperature?: number; seed?: number; n?: number },
    signal?: Signal,
  ) => stream<{ index: number; pixel: number; value: number }>('api/image/complete', body, signal),

  runs: (signal?: Signal) => get<{ folder: string; runs: Run[] }>('api/runs', signal),
  run: (name: string, after = 0, samplesAfter = -1, signal?: Signal) =>
    get<RunLog>(`api/runs/${encodeURIComponent(name)}?after=${after}&samples_after=${samplesAfter}`, signal),

  /** A whole answer of /v1/completions. */
  complete: (body: CompletionAsk, signal?: Signal) => post<Completion>('v1/completions', body, signal),
  /** The same, piece by piece: for await (const piece of api.streamed(...)). Breaking out stops the server's work. */
  streamed: (body: CompletionAsk, signal?: Signal) =>
    stream<Completion>('v1/completions', { ...body, stream: true }, signal),
}
