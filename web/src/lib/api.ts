// The API of the server, with types generated from its schema (schema.ts; `python web/schema.py`). Every call takes an
// AbortSignal last, and fails with an ApiError that can be shown.

import { ARRAYS, unpack, type Decoded } from './arrays'
import type { components, paths } from './schema'
import { events } from './sse'

type Schemas = components['schemas']
export type Token = Schemas['Token']
export type Label = Schemas['LabelProbability']
export type Model = Schemas['ModelDescription']
export type Pullable = Schemas['PullableModel']
export type Which = Schemas['LayerResponse']['which']
export type AttentionMap = Decoded<Schemas['LayerResponse']>
export type Overview = Decoded<Schemas['OverviewResponse']>
export type Neuron = Decoded<Schemas['NeuronResponse']>
export type Steps = Decoded<Schemas['StepsResponse']>
export type StepsMap = Decoded<Schemas['MapResponse']>
export type StepsLayer = Decoded<Schemas['LayerSteps']>
export type StepsWeights = Decoded<Schemas['ParametersResponse']>
export type Affine = Decoded<Schemas['LinearParameters']>
export type LearnedNorm = Decoded<Schemas['NormParameters']>
export type LessonList = Schemas['LessonsResponse']
export type LessonSummary = Schemas['LessonSummary']
export type Lesson = Schemas['LessonResponse']
export type LessonPart = Schemas['LessonPart']
export type Verdict = Schemas['ExerciseResponse']
export type Run = Schemas['RunSummary']
export type Training = Schemas['TrainingState']
export type RunLog = Schemas['RunResponse']
export type CompletionLogprobs = Schemas['CompletionLogprobs']
export type Choice = Schemas['CompletionChoice']
export type Completion = Schemas['CompletionResponse']
export type ChatLogprob = Schemas['ChatLogprob']
/** A function that a model may call. */
export type Tool = NonNullable<Schemas['ChatRequest']['tools']>[number]
/** A call of a tool that the model asks for; its arguments are JSON, as the model wrote it. */
export type ToolCall = Schemas['MessageToolCall']
/** A part of a call, which has the index of its call. */
export interface ToolCallDelta {
  index: number
  id?: string
  function?: { name?: string; arguments?: string }
}
export type ChatMessage = {
  role: 'system' | 'user' | 'assistant' | 'tool'
  content: string
  tool_calls?: ToolCall[]
  tool_call_id?: string
}
/** A part of a streamed answer to a conversation. */
export interface ChatChunk {
  choices: {
    delta: { content?: string | null; tool_calls?: ToolCallDelta[] }
    logprobs: { content: ChatLogprob[] | null } | null
    finish_reason: 'stop' | 'length' | 'tool_calls' | null
  }[]
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
/** The token of the address that the server printed: what runs code or trains asks for it. It is kept for this host and
 * port alone (a cookie would go to every port), and sent as a header. */
export const token = {
  get: (): string => {
    try {
      return localStorage.getItem('heedful-token') ?? kept
    } catch {
      return kept
    }
  },
  /** Take it out of the address bar. */
  take: (): void => {
    const address = new URL(location.href)
    kept = address.searchParams.get('token') ?? ''
    if (!kept) return
    address.searchParams.delete('token')
    history.replaceState(history.state, '', address)
    try {
      localStorage.setItem('heedful-token', kept)
    } catch {
      // This browser keeps nothing: the token lasts as long as this page.
    }
  },
}
let kept = ''
const listeners = new Set<() => void>()
/** Call this whenever the server asks for a key. */
export const onKeyWanted = (listener: () => void): void => void listeners.add(listener)

async function send(path: string, body: unknown, signal?: AbortSignal): Promise<Response> {
  const headers: Record<string, string> = {
    accept: `${ARRAYS}, application/json`,
    ...(key.get() ? { authorization: `Bearer ${key.get()}` } : {}),
    ...(token.get() ? { 'x-heedful-token': token.get() } : {}),
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
    response = await fetch(new URL(path.slice(1), document.baseURI), request)
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

/** With a capital letter at its beginning and a full stop at its end. */
export function sentence(text: string): string {
  const first = text.charAt(0).toUpperCase() + text.slice(1)
  return /[.!?]$/.test(first) ? first : first + '.'
}

// Bodies and responses of a route, by its path in the schema.
type GetPath = { [P in keyof paths]: paths[P]['get'] extends object ? P : never }[keyof paths]
type PostPath = { [P in keyof paths]: paths[P]['post'] extends object ? P : never }[keyof paths]
type JsonBody<Operation> = Operation extends { requestBody: { content: { 'application/json': infer Body } } }
  ? Body
  : never
type JsonResponse<Operation> = Operation extends {
  responses: { 200: { content: { 'application/json': infer Content } } }
}
  ? Decoded<Content>
  : never
type EventData<Operation> = Operation extends { responses: { 200: { content: { 'text/event-stream': infer Data } } } }
  ? Data
  : never

async function decode<Content>(response: Response): Promise<Content> {
  const packed = response.headers.get('content-type') === ARRAYS
  return (packed ? unpack(await response.arrayBuffer()) : await response.json()) as Content
}

/** A call of a GET route. */
const get =
  <P extends GetPath>(path: P) =>
  async (signal?: AbortSignal): Promise<JsonResponse<paths[P]['get']>> =>
    decode(await send(path, undefined, signal))

/** A call of a POST route. */
const post =
  <P extends PostPath>(path: P) =>
  async (body: JsonBody<paths[P]['post']>, signal?: AbortSignal): Promise<JsonResponse<paths[P]['post']>> =>
    decode(await send(path, body, signal))

const BROKEN_OFF = 'The connection to the server broke off. Is it still running?'

/** The data of the server-sent events of a route. */
async function* stream<Data>(path: string, body: unknown, signal?: AbortSignal): AsyncGenerator<Data> {
  const response = await send(path, body, signal)
  try {
    for await (const data of events(response.body!)) {
      if (data === '[DONE]') return
      const event = JSON.parse(data)
      if (event.error?.message)
        throw new ApiError(sentence(event.error.message), 500, event.error.param, event.error.code)
      yield event as Data
    }
  } catch (problem) {
    if (problem instanceof TypeError) throw new ApiError(BROKEN_OFF, 0) // a browser's word for a connection that ended
    throw problem
  }
  throw new ApiError(BROKEN_OFF, 0)
}

const lessonPath = (name: string): string => `/api/lessons/${encodeURIComponent(name)}`

export const api = {
  models: get('/api/models'),
  tokens: post('/api/tokens'),
  next: post('/api/next'),
  lens: post('/api/lens'),

  fill: post('/api/fill'),
  fillToken: post('/api/fill/token'),
  bias: post('/api/bias'),

  attention: post('/api/attention'),
  overview: post('/api/attention/overview'),
  neuron: post('/api/attention/neuron'),
  alignment: post('/api/alignment'),
  rollout: async (body: Schemas['RolloutRequest'] & { text: string }, signal?: AbortSignal) =>
    (await post('/api/rollout')(body, signal)) as Decoded<Schemas['TextRolloutResponse']>,
  steps: post('/api/steps'),
  stepsMap: post('/api/steps/map'),
  stepsWeights: post('/api/steps/weights'),

  translate: post('/api/translate'),
  classify: post('/api/classify'),
  answer: post('/api/answer'),
  tag: post('/api/tag'),
  neighbours: post('/api/neighbours'),

  images: get('/api/images'),
  classifyImage: post('/api/image/classify'),
  completeImage: (body: Schemas['ImageCompletionRequest'], signal?: AbortSignal) =>
    stream<EventData<paths['/api/image/complete']['post']>>('/api/image/complete', body, signal),

  runs: get('/api/runs'),
  train: post('/api/train'),
  stopTraining: async (body: object, signal?: AbortSignal): Promise<Training> =>
    decode(await send('/api/train/stop', body, signal)),
  run: async (name: string, after = 0, samplesAfter = -1, signal?: AbortSignal): Promise<RunLog> => {
    const query = `after=${after}&samples_after=${samplesAfter}`
    return decode(await send(`/api/runs/${encodeURIComponent(name)}?${query}`, undefined, signal))
  },

  lessons: get('/api/lessons'),
  lesson: async (name: string, signal?: AbortSignal): Promise<Lesson> =>
    decode(await send(lessonPath(name), undefined, signal)),
  /** What a lesson's cells show, each as it ends. Breaking out stops them. */
  runLesson: (name: string, signal?: AbortSignal) =>
    stream<EventData<paths['/api/lessons/{name}/run']['post']>>(`${lessonPath(name)}/run`, {}, signal),
  checkAnswer: async (name: string, body: Schemas['ExerciseRequest'], signal?: AbortSignal): Promise<Verdict> =>
    decode(await send(`${lessonPath(name)}/check`, body, signal)),

  /** The answer to a conversation, as it is written. Breaking out stops the server's work. */
  chat: (body: Schemas['ChatRequest'], signal?: AbortSignal) =>
    stream<ChatChunk>('/v1/chat/completions', { ...body, stream: true }, signal),
  /** A conversation as the model's chat template writes it. */
  chatPrompt: post('/api/chat/prompt'),

  /** A whole response of /v1/completions. */
  complete: post('/v1/completions'),
  /** The same as a stream: for await (const chunk of api.streamed(...)). Breaking out stops the server's work. */
  streamed: (body: Schemas['CompletionRequest'], signal?: AbortSignal) =>
    stream<Completion>('/v1/completions', { ...body, stream: true }, signal),
}
