// A conversation as a tree: each message knows the one that it follows. Editing a message or asking for another answer
// adds one beside it, so that nothing that was said is lost; what is shown is the way from the first message to one.

import type { ChatMessage } from '../../lib/api'

export interface Turn {
  role: 'user' | 'assistant'
  content: string
  /** The index of the message that it follows; -1: it is the first. */
  parent: number
  /** The model that wrote it. */
  by?: string
  /** Why it ends where it does; 'stopped': by the reader. */
  end?: 'stop' | 'length' | 'stopped' | 'failed'
}
export interface Talk {
  id: string
  system: string
  /** When it was changed last, in milliseconds since 1970. */
  changed: number
  turns: Turn[]
  /** The last message that is shown; -1: there is none. */
  leaf: number
}

const MOST_TURNS = 2000
const MOST_CHARACTERS = 1_000_000 // of all messages together
const LONGEST_LINK = 8000 // characters in an address: more than that is cut or refused on its way

export const fresh = (system = ''): Talk => ({
  id: Math.random().toString(36).slice(2, 10).padEnd(8, '0'),
  system,
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
export function add(talk: Talk, turn: Turn): number {
  if (talk.turns.length >= MOST_TURNS) throw new Error('This conversation is full: begin a new one.')
  talk.turns.push(turn)
  talk.leaf = talk.turns.length - 1
  talk.changed = Date.now()
  return talk.leaf
}

/** What the model is sent: the system prompt, if there is one, and all up to a message. */
export function messages(talk: Talk, to = talk.leaf): ChatMessage[] {
  const said = path(talk, to).map((i) => ({ role: talk.turns[i].role, content: talk.turns[i].content }))
  return talk.system.trim() ? [{ role: 'system', content: talk.system }, ...said] : said
}

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
    .map(({ role, content }) => `${role}: ${content}`)
    .join('\n\n') + '\n'

// --- links and files -------------------------------------------------------------------------------------------------

/** What is shown, for an address: the system prompt, then the messages in turn; nothing where that is too long. */
export function link(talk: Talk): string[] {
  const said = path(talk).map((i) => talk.turns[i].content)
  const whole = [talk.system, ...said]
  return said.length && encodeURIComponent(JSON.stringify(whole)).length <= LONGEST_LINK ? whole : []
}

/** The conversation of a link. */
export function unlink([system, ...said]: string[]): Talk {
  const turns = said.map((content, i): Turn => ({ role: i % 2 ? 'assistant' : 'user', content, parent: i - 1 }))
  return { ...fresh(system), turns, leaf: turns.length - 1 }
}

const text = (value: unknown): value is string => typeof value === 'string'

function checkedTurn(value: unknown, index: number): Turn | null {
  const { role, content, parent, by, end } = (value ?? {}) as Record<string, unknown>
  if ((role !== 'user' && role !== 'assistant') || !text(content)) return null
  if (typeof parent !== 'number' || !Number.isInteger(parent) || parent < -1 || parent >= index) return null
  const turn: Turn = { role, content, parent }
  if (text(by)) turn.by = by
  if (end === 'stop' || end === 'length' || end === 'stopped' || end === 'failed') turn.end = end
  return turn
}

/** A conversation out of a file or the browser's storage, or messages as OpenAI's API has them; null: neither. */
export function checked(value: unknown): Talk | null {
  if (!value || typeof value !== 'object') return null
  const { id, system, changed, turns, leaf, messages } = value as Record<string, unknown>
  if (Array.isArray(messages)) return fromMessages(messages)
  if (!text(id) || !/^[a-z0-9]{8}$/.test(id) || !text(system) || !Array.isArray(turns)) return null
  if (turns.length > MOST_TURNS) return null
  const found = turns.map(checkedTurn)
  if (found.some((turn) => turn === null)) return null
  const last = typeof leaf === 'number' && Number.isInteger(leaf) && leaf >= -1 && leaf < found.length ? leaf : -1
  const talk = { id, system, changed: typeof changed === 'number' ? changed : 0, turns: found as Turn[], leaf: last }
  return talk.turns.reduce((sum, turn) => sum + turn.content.length, system.length) > MOST_CHARACTERS ? null : talk
}

function fromMessages(messages: unknown[]): Talk | null {
  const talk = fresh()
  for (const message of messages.slice(0, MOST_TURNS)) {
    const { role, content } = (message ?? {}) as Record<string, unknown>
    if (!text(content)) return null
    if (role === 'system' || role === 'developer') talk.system = content
    else if (role === 'user' || role === 'assistant') add(talk, { role, content, parent: talk.leaf })
    else return null
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
