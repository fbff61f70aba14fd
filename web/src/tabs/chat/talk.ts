// A conversation as a tree: each message knows the one that it follows. Editing a message or asking for another answer
// adds one beside it, so that nothing that was said is lost; what is shown is the way from the first message to one.

import type { ChatMessage, Tool, ToolCall } from '../../lib/api'
import { askedOf, written, type Asked } from './boxes'

export interface Turn {
  /** Its name within the conversation, the same in every window. */
  key: string
  role: 'user' | 'assistant' | 'tool'
  content: string
  /** The index of the message that it follows; -1: it is the first. */
  parent: number
  /** The model that wrote it. */
  by?: string
  /** Why it ends where it does; 'stopped': by the reader. */
  end?: (typeof ENDS)[number]
  /** The tools that it calls. */
  tool_calls?: ToolCall[]
  /** Of a tool's result: the call that it is of. */
  tool_call_id?: string
  /** It was written by a schema. */
  json?: boolean
}
/** What holds for a whole conversation: the texts of the boxes at the side. */
export interface Boxes {
  system: string
  schema: string
  tools: string
  /** A message of the user is answered by a call of a tool. */
  must: boolean
}
export interface Talk extends Boxes {
  id: string
  /** When it was changed last, in milliseconds since 1970. */
  changed: number
  turns: Turn[]
  /** The last message that is shown; -1: there is none. */
  leaf: number
}

const ENDS = ['stop', 'length', 'tool_calls', 'stopped', 'failed'] as const
const MOST_TURNS = 2000
const MOST_CHARACTERS = 1_000_000 // of all messages together
const LONGEST_LINK = 8000 // characters in an address: more than that is cut or refused on its way

const random = (): string => Math.random().toString(36).slice(2, 10).padEnd(8, '0')

export const fresh = ({ system = '', schema = '', tools = '', must = false }: Partial<Boxes> = {}): Talk => ({
  id: random(),
  system,
  schema,
  tools,
  must,
  changed: Date.now(),
  turns: [],
  leaf: -1,
})

/** The indices of the messages that are shown, from the first to the last; or to the one named. */
export function path(talk: Talk, to = talk.leaf): number[] {
  const found: number[] = []
  for (let at = to; at >= 0; at = talk.turns[at].parent) found.unshift(at)
  return found
}

/** The messages in the place of one: itself, and what was said there otherwise. */
export const siblings = (talk: Talk, index: number): number[] =>
  talk.turns.flatMap((turn, i) => (turn.parent === talk.turns[index].parent ? [i] : []))

/** Show a message, and of what followed it the latest. */
export function show(talk: Talk, index: number): void {
  const after = (at: number): number => talk.turns.findLastIndex((turn) => turn.parent === at)
  talk.leaf = index
  for (let next = after(index); next >= 0; next = after(next)) talk.leaf = next
}

/** Add a message after another, and show it; its index. */
export function add(talk: Talk, turn: Omit<Turn, 'key'>): number {
  if (talk.turns.length >= MOST_TURNS) throw new Error('This conversation is full: begin a new one.')
  talk.turns.push({ ...turn, key: random() })
  talk.leaf = talk.turns.length - 1
  talk.changed = Date.now()
  return talk.leaf
}

/** Take over what was said in another window: messages that are not here yet, and the ends of those that are. Where
 * what is shown was continued there, that is shown. Returns whether there is more here than there. */
export function merge(talk: Talk, other: Talk): boolean {
  const known = new Map(talk.turns.map(({ key }, i) => [key, i]))
  const places: number[] = [] // of the other's messages here
  for (const turn of other.turns) {
    const parent = turn.parent < 0 ? -1 : places[turn.parent]
    let at = known.get(turn.key)
    if (at === undefined) {
      if (talk.turns.length >= MOST_TURNS) return true
      at = talk.turns.push({ ...turn, parent }) - 1
    } else if (turn.end && !talk.turns[at].end) Object.assign(talk.turns[at], turn, { parent })
    places.push(at)
  }
  const shown = path(other).map((i) => places[i])
  if (talk.leaf < 0 || shown.includes(talk.leaf)) talk.leaf = shown.at(-1) ?? -1
  if (other.changed > talk.changed) {
    const { system, schema, tools, must, changed } = other
    Object.assign(talk, { system, schema, tools, must, changed })
  }
  const there = new Set(other.turns.map(({ key }) => key))
  return talk.turns.some(({ key }) => !there.has(key))
}

/** As it is kept: without a reply of which nothing has come yet. */
export function settled(talk: Talk): Talk {
  const last = talk.turns.at(-1)
  if (!last || last.role !== 'assistant' || last.content || last.tool_calls || last.end) return talk
  const leaf = talk.leaf === talk.turns.length - 1 ? last.parent : talk.leaf
  return { ...talk, turns: talk.turns.slice(0, -1), leaf }
}

/** What the model is sent: the system prompt, if there is one, and all up to a message. */
export function messages(talk: Talk, to = talk.leaf): ChatMessage[] {
  const said = path(talk, to).map((i): ChatMessage => {
    const { role, content, tool_calls, tool_call_id } = talk.turns[i]
    return { role, content, ...(tool_calls && { tool_calls }), ...(tool_call_id !== undefined && { tool_call_id }) }
  })
  return talk.system.trim() ? [{ role: 'system', content: talk.system }, ...said] : said
}

/** What stands before a reply: the messages, and the tools, of which the model reads, too. */
export function promptOf(talk: Talk, to = talk.leaf): { messages: ChatMessage[]; tools?: Tool[] } {
  const { tools } = askedOf(talk).asked
  return { messages: messages(talk, to), ...(tools && { tools }) }
}

/** The name of the tool that a result is of. */
export function toolOf(talk: Talk, index: number): string {
  const { tool_call_id } = talk.turns[index]
  const calls = path(talk, index).flatMap((i) => talk.turns[i].tool_calls ?? [])
  return calls.findLast(({ id }) => id === tool_call_id)?.function.name ?? ''
}

/** A message as one text: what it says, and what it calls. */
export const textOf = ({ content, tool_calls = [] }: Pick<Turn, 'content' | 'tool_calls'>): string =>
  [content, ...tool_calls.map(({ function: { name, arguments: given } }) => `${name}(${given})`)]
    .filter(Boolean)
    .join('\n')

export function title(talk: Talk): string {
  const first =
    talk.turns
      .find((turn) => turn.role === 'user')
      ?.content.replace(/\s+/g, ' ')
      .trim() ?? ''
  return first === '' ? 'New chat' : first.length > 48 ? first.slice(0, 47) + '…' : first
}

/** What is shown as text. */
export const transcript = (talk: Talk): string =>
  messages(talk)
    .map((message) => `${message.role}: ${textOf(message)}`)
    .join('\n\n') + '\n'

// --- links and files -------------------------------------------------------------------------------------------------

/** What is shown, for an address: the system prompt, then the messages in turn; nothing where that is too long. With
 * tools or a schema it is one text: the request, as the API would be sent it. */
export function link(talk: Talk): string[] {
  const turns = path(talk).map((i) => talk.turns[i])
  const { asked } = askedOf(talk)
  const plain =
    !asked.tools && !asked.response_format && turns.every((turn) => !turn.tool_calls && turn.role !== 'tool')
  const whole = plain
    ? [talk.system, ...turns.map((turn) => turn.content)]
    : [JSON.stringify({ messages: messages(talk), ...asked })]
  return turns.length && encodeURIComponent(JSON.stringify(whole)).length <= LONGEST_LINK ? whole : []
}

/** The conversation of a link. */
export function unlink([system, ...said]: string[]): Talk {
  if (!said.length) return request(system) ?? fresh()
  const turns = said.map((content, i): Turn => ({
    key: String(i),
    role: i % 2 ? 'assistant' : 'user',
    content,
    parent: i - 1,
  }))
  return { ...fresh({ system }), turns, leaf: turns.length - 1 }
}

function request(text: string): Talk | null {
  try {
    return checked(JSON.parse(text))
  } catch {
    return null
  }
}

const text = (value: unknown): value is string => typeof value === 'string'

/** Calls as OpenAI's API has them; none: undefined; null: they are no calls. */
function checkedCalls(value: unknown): ToolCall[] | undefined | null {
  if (value === undefined || value === null) return undefined
  if (!Array.isArray(value)) return null
  const found = value.map((one): ToolCall | null => {
    const { id, function: called } = (one ?? {}) as Record<string, unknown>
    const { name, arguments: given } = (called ?? {}) as Record<string, unknown>
    return text(id) && text(name) && text(given) ? { id, type: 'function', function: { name, arguments: given } } : null
  })
  return found.includes(null) ? null : found.length ? (found as ToolCall[]) : undefined
}

function checkedTurn(value: unknown, index: number): Turn | null {
  const { role, content, parent, by, end, json, ...more } = (value ?? {}) as Record<string, unknown>
  if ((role !== 'user' && role !== 'assistant' && role !== 'tool') || !text(content)) return null
  if (typeof parent !== 'number' || !Number.isInteger(parent) || parent < -1 || parent >= index) return null
  const turn: Turn = { key: text(more.key) ? more.key : String(index), role, content, parent }
  const calls = role === 'assistant' ? checkedCalls(more.tool_calls) : undefined
  if (calls === null || (role === 'tool' && !text(more.tool_call_id))) return null
  if (calls) turn.tool_calls = calls
  if (role === 'tool') turn.tool_call_id = more.tool_call_id as string
  if (text(by)) turn.by = by
  if (ENDS.includes(end as never)) turn.end = end as Turn['end']
  if (json === true) turn.json = true
  return turn
}

/** A conversation out of a file or the browser's storage, or messages as OpenAI's API has them; null: neither. */
export function checked(value: unknown): Talk | null {
  if (!value || typeof value !== 'object') return null
  const { id, system, schema, tools, must, changed, turns, leaf, messages } = value as Record<string, unknown>
  if (Array.isArray(messages)) return fromRequest(messages, value)
  if (!text(id) || !/^[a-z0-9]{8}$/.test(id) || !text(system) || !Array.isArray(turns)) return null
  if (turns.length > MOST_TURNS) return null
  const found = turns.map(checkedTurn)
  if (found.some((turn) => turn === null)) return null
  const last = typeof leaf === 'number' && Number.isInteger(leaf) && leaf >= -1 && leaf < found.length ? leaf : -1
  const talk: Talk = {
    id,
    system,
    schema: text(schema) ? schema : '',
    tools: text(tools) ? tools : '',
    must: must === true,
    changed: typeof changed === 'number' ? changed : 0,
    turns: found as Turn[],
    leaf: last,
  }
  return JSON.stringify(talk).length > MOST_CHARACTERS ? null : talk
}

/** A request of OpenAI's API: messages, and the tools and the schema that may stand with them. */
function fromRequest(messages: unknown[], request: { [field in keyof Asked]?: unknown }): Talk | null {
  const schema = (request.response_format as { json_schema?: { schema?: unknown } } | undefined)?.json_schema?.schema
  const talk = fresh({
    schema: schema === undefined ? '' : written(schema),
    tools: Array.isArray(request.tools) ? written(request.tools) : '',
    must: request.tool_choice === 'required',
  })
  for (const message of messages.slice(0, MOST_TURNS)) {
    const { role, content } = (message ?? {}) as Record<string, unknown>
    if ((role === 'system' || role === 'developer') && text(content)) talk.system = content
    else {
      const turn = checkedTurn({ ...(message as object), content: content ?? '', parent: talk.leaf }, talk.turns.length)
      if (!turn) return null
      if (turn.role === 'assistant' && !turn.tool_calls && talk.schema) turn.json = true
      add(talk, turn)
    }
  }
  return talk
}

/** All conversations of a file: one that was exported here, or messages. */
export function imported(file: string): Talk[] {
  let value: unknown
  try {
    value = JSON.parse(file)
  } catch {
    throw new Error('This is no JSON file.')
  }
  const inside = (value as { conversations?: unknown } | null)?.conversations ?? value
  const several = Array.isArray(inside) ? inside : [inside]
  const isMessages = several.length > 0 && several.every((one) => one && typeof one === 'object' && 'role' in one)
  const found = (isMessages ? [{ messages: several }] : several).map(checked)
  if (!found.length || found.some((talk) => talk === null))
    throw new Error('There are no conversations in this file: it must be one that was exported here, or messages.')
  return found as Talk[]
}

export const exported = (talks: Talk[]): string => JSON.stringify({ conversations: talks }, null, 1) + '\n'
