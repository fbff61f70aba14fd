// What a reply must be and what it may call: a JSON schema and a list of tools, as they are typed and as the API has
// them.

import type { Tool, ToolCall } from '../../lib/api'

/** Fields of /v1/chat/completions. */
export interface Asked {
  response_format?: {
    type: 'json_schema'
    json_schema: { name: string; schema: Record<string, unknown>; strict: true }
  }
  tools?: Tool[]
  tool_choice?: 'required'
  parallel_tool_calls?: false
}
/** What was typed: its value, or what is wrong with it; neither where nothing was. */
interface Typed<T> {
  value?: T
  problem: string
}

const isObject = (value: unknown): value is Record<string, unknown> =>
  typeof value === 'object' && value !== null && !Array.isArray(value)

export function schemaOf(text: string): Typed<Record<string, unknown>> {
  const { value, problem } = parsed(text)
  if (value === undefined || isObject(value)) return { value, problem }
  return { problem: 'A schema is an object: {"type": "object", "properties": …}.' }
}

export function toolsOf(text: string): Typed<Tool[]> {
  const { value, problem } = parsed(text)
  if (value === undefined) return { problem }
  if (!Array.isArray(value)) return { problem: 'Tools are a list: [{"type": "function", "function": …}].' }
  for (const [i, tool] of value.entries()) {
    const named = isObject(tool) && isObject(tool.function) ? tool.function.name : undefined
    if (typeof named !== 'string' || named === '')
      return { problem: `Tool ${i + 1} needs {"type": "function", "function": {"name": …}}.` }
  }
  return value.length ? { value, problem: '' } : { problem: '' }
}

/** What the two boxes ask of the server, and the first thing that is wrong with them. */
export function askedOf(boxes: { schema: string; tools: string; must?: boolean }): { asked: Asked; problem: string } {
  const [schema, tools] = [schemaOf(boxes.schema), toolsOf(boxes.tools)]
  const asked: Asked = {}
  if (schema.value)
    asked.response_format = {
      type: 'json_schema',
      json_schema: { name: 'reply', schema: schema.value, strict: true },
    }
  if (tools.value) asked.tools = tools.value
  if (tools.value && boxes.must) Object.assign(asked, { tool_choice: 'required', parallel_tool_calls: false })
  const problem = schema.problem ? `The schema: ${schema.problem}` : tools.problem ? `The tools: ${tools.problem}` : ''
  return { asked, problem }
}

// --- JSON ------------------------------------------------------------------------------------------------------------

/** The value of JSON, or where it is wrong: browsers say that each in its own words, and some not at all. */
export function parsed(text: string): Typed<unknown> {
  if (text.trim() === '') return { problem: '' }
  try {
    return { value: JSON.parse(text), problem: '' }
  } catch {
    const at = new Scanner(text).wrong()
    if (at >= text.trimEnd().length) return { problem: 'This JSON is not complete.' }
    const lines = text.slice(0, at).split('\n')
    const found = text.slice(at).split('\n')[0]
    const shown = found.length > 12 ? found.slice(0, 11) + '…' : found
    return { problem: `Line ${lines.length}, column ${lines.at(-1)!.length + 1}: ${shown} is not JSON here.` }
  }
}

const STRING = /\s*"(?:\\.|[^"\\\n])*"/y
const SCALAR = /\s*(?:-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null)(?!\w)/y

/** Reads JSON as far as it is any. */
class Scanner {
  at = 0

  constructor(readonly text: string) {}

  /** The index of the first character that is wrong. */
  wrong(): number {
    try {
      this.#value()
    } catch {
      this.at = 0 // nested too deeply
    }
    this.#take(/\s*/y)
    return this.at
  }

  #take(pattern: RegExp): boolean {
    pattern.lastIndex = this.at
    const found = pattern.test(this.text)
    if (found) this.at = pattern.lastIndex
    return found
  }

  #value(): boolean {
    if (this.#take(/\s*\{/y))
      return this.#items(() => this.#take(STRING) && this.#take(/\s*:/y) && this.#value(), /\s*\}/y)
    if (this.#take(/\s*\[/y)) return this.#items(() => this.#value(), /\s*\]/y)
    return this.#take(STRING) || this.#take(SCALAR)
  }

  #items(item: () => boolean, end: RegExp): boolean {
    if (this.#take(end)) return true
    do if (!item()) return false
    while (this.#take(/\s*,/y))
    return this.#take(end)
  }
}

/** JSON with a line for each value, also where its end is missing; nothing else of it changes. */
export function indented(text: string): string {
  const tokens = text.match(/"(?:\\.|[^"\\])*"?|[{}[\],:]|[^\s{}[\],:"]+/gs) ?? []
  const opens = (token: string | undefined): boolean => token === '{' || token === '['
  const parts: string[] = []
  let depth = 0
  const line = (): string => '\n' + '  '.repeat(depth)
  for (const [i, token] of tokens.entries()) {
    const before = tokens[i - 1]
    if (token === '}' || token === ']') {
      depth = Math.max(0, depth - 1)
      if (!opens(before)) parts.push(line())
    } else if (opens(before) || before === ',') parts.push(line())
    if (opens(token)) depth++
    parts.push(token === ':' ? ': ' : token)
  }
  return parts.join('')
}

/** The arguments of a call by their names; null where they are no object, or not complete. */
export function argumentsOf(text: string): [string, string][] | null {
  try {
    const value: unknown = JSON.parse(text)
    if (!isObject(value)) return null
    return Object.entries(value).map(([name, one]) => [name, typeof one === 'string' ? one : JSON.stringify(one)])
  } catch {
    return null
  }
}

/** Calls as one edits them: [{"name": …, "arguments": {…}}]. */
export const callsText = (calls: ToolCall[]): string =>
  written(calls.map(({ function: { name, arguments: given } }) => ({ name, arguments: parsed(given).value ?? given })))

/** The calls of a text that was edited; each keeps the id that the call in its place had. */
export function callsOf(text: string, before: ToolCall[]): Typed<ToolCall[]> {
  const { value, problem } = parsed(text)
  if (problem) return { problem }
  const list = Array.isArray(value) ? value : []
  if (
    !list.length ||
    !list.every((call) => isObject(call) && typeof call.name === 'string' && isObject(call.arguments))
  )
    return { problem: 'Calls are a list: [{"name": …, "arguments": {…}}].' }
  const id = (i: number): string => before[i]?.id ?? `call_${Math.random().toString(36).slice(2, 11)}`
  const calls = (list as { name: string; arguments: object }[]).map(({ name, arguments: given }, i): ToolCall => ({
    id: id(i),
    type: 'function',
    function: { name, arguments: JSON.stringify(given) },
  }))
  return { value: calls, problem: '' }
}

// --- examples --------------------------------------------------------------------------------------------------------

const WIDTH = 32 // characters of a line in the box at the side
const text = { type: 'string' }
const object = (properties: Record<string, object>) => ({
  type: 'object' as const,
  properties,
  required: Object.keys(properties),
  additionalProperties: false,
})
export const SCHEMAS = [
  { label: 'A person', schema: object({ name: text, age: { type: 'integer' }, city: text }) },
  {
    label: 'A verdict',
    schema: object({ verdict: { enum: ['good', 'bad', 'mixed'] }, stars: { type: 'integer', minimum: 1, maximum: 5 } }),
  },
  { label: 'A list', schema: object({ title: text, items: { type: 'array', items: text, maxItems: 5 } }) },
]
export const WEATHER: Tool[] = [
  {
    type: 'function',
    function: {
      name: 'get_weather',
      description: 'The weather now',
      parameters: object({ city: text, unit: { enum: ['celsius', 'fahrenheit'] } }),
    },
  },
]
/** As it stands in a box: JSON in which what is short has one line; `used` characters of the first one are taken. */
export function written(value: unknown, indent = '', used = 0): string {
  const flat = indented(JSON.stringify(value))
    .replace(/(?<=[{[])\n\s*|\n\s*(?=[\]}])/g, '')
    .replace(/\n\s*/g, ' ')
  if (typeof value !== 'object' || value === null || indent.length + used + flat.length <= WIDTH) return flat
  const inner = indent + '  '
  const items = Array.isArray(value)
    ? value.map((one) => written(one, inner))
    : Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${written(one, inner, name.length + 4)}`)
  const [open, close] = Array.isArray(value) ? '[]' : '{}'
  return `${open}\n${items.map((item) => inner + item).join(',\n')}\n${indent}${close}`
}
