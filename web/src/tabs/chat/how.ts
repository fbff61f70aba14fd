// The settings of a chat, as the address has them and as the server, Python and the command line want them.

import type { ChatMessage } from '../../lib/api'
import { call, curl, heedful, py, sh, type Code, type Named } from '../../lib/code'
import { isSeed } from '../complete/how'
import type { How } from './reply.svelte'

export const USUAL = {
  talk: '', // which conversation
  said: [] as string[], // what is said in it, for those who do not have it
  draft: '',
  temperature: 0.7,
  top_p: 0.9,
  length: 400,
  seed: '',
  tint: false as boolean,
  markdown: false as boolean,
}
export type Own = typeof USUAL

/** What to begin with: a small model tells stories and knows little. */
export const startersOf = ({ parameters }: { parameters: number }): string[] =>
  parameters < 1e8
    ? ['Tell me a short story about a cat.', 'How do I make a cup of tea?', 'Hello, how are you?']
    : ['What is attention in a Transformer?', 'Write a short poem about the sea.', 'Give me three names for a cat.']

export const longest = (context: number | null): number => Math.max(1, Math.min(2000, (context ?? 2001) - 1))

const within = (value: number, low: number, high: number): number => Math.min(Math.max(value, low), high)

/** What is asked of the server; an address may hold anything, so all is brought within its limits. */
export function howOf(own: Own, context: number | null): How {
  const how: How = {
    max_tokens: within(Math.round(own.length), 1, longest(context)),
    temperature: within(own.temperature, 0, 2),
  }
  if (own.top_p < 1) how.top_p = within(own.top_p, 0.01, 1)
  if (own.seed.trim() !== '' && isSeed(own.seed)) how.seed = Number(own.seed.trim())
  return how
}

/** The same answer elsewhere. */
export function codeOf(model: Named, said: ChatMessage[], how: How): Code {
  const listed = said.map((message) => `    ${py(message)},`).join('\n')
  const { max_tokens, temperature, top_p, seed, tools } = how
  const schema = how.response_format?.json_schema.schema
  const options = { chat: true, max_tokens, temperature, top_p, seed }
  const named = Object.entries(options).filter(([, value]) => value !== undefined)
  const long = Object.entries({ schema, tools }).filter(([, value]) => value !== undefined)
  const given = [...named.map(([name, value]) => `${name}=${py(value)}`), ...long.map(([name]) => `${name}=${name}`)]
  const [first, ...rest] = said
  const system = first?.role === 'system' ? first.content : undefined
  const asked = system === undefined ? said : rest
  // The command answers one message; a conversation goes on in it by hand.
  const flags = { model: model.source, system, temperature, 'top-p': top_p, 'max-tokens': max_tokens, seed }
  const file = schema && 'schema.json'
  const command = heedful('chat', asked.length === 1 ? [asked[0].content] : [], { ...flags, schema: file })
  return {
    python: [
      'import heedful',
      '',
      `model = ${call('heedful.load', [model.source])}`,
      'messages = [',
      listed,
      ']',
      ...long.map(([name, value]) => `${name} = ${py(value)}`),
      `for piece in model.stream(messages, ${given.join(', ')}):`,
      '    print(piece, end="", flush=True)',
    ].join('\n'),
    // The command knows no tools.
    shell: tools ? undefined : file ? `echo ${sh(JSON.stringify(schema))} > ${file}\n${command}` : command,
    curl: curl('/v1/chat/completions', { model: model.id, messages: said, ...how }),
  }
}
