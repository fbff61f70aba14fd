import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest'
import { api, ApiError } from '../src/lib/api'
import {
  argumentsOf,
  askedOf,
  callsOf,
  callsText,
  indented,
  parsed,
  SCHEMAS,
  toolsOf,
  WEATHER,
  written,
} from '../src/tabs/chat/boxes'
import { codeOf, startersOf } from '../src/tabs/chat/how'
import { takeCalls, Tokens } from '../src/tabs/chat/reply.svelte'
import {
  add,
  checked,
  exported,
  fresh,
  imported,
  link,
  messages,
  path,
  promptOf,
  show,
  siblings,
  title,
  toolOf,
  transcript,
  unlink,
  merge,
  type Talk,
} from '../src/tabs/chat/talk'

const bytes = (text: string) => [...new TextEncoder().encode(text)]

function talked() {
  const talk = fresh({ system: 'Be kind.' })
  const first = add(talk, { role: 'user', content: 'Hello\nthere', parent: -1 })
  const answer = add(talk, { role: 'assistant', content: 'Hi', parent: first, by: 'small', end: 'stop' })
  add(talk, { role: 'user', content: 'Bye', parent: answer })
  return talk
}

describe('what to begin with', () => {
  it('fits the model', () => {
    expect(startersOf({ parameters: 31e6 }).join()).not.toContain('Transformer')
    expect(startersOf({ parameters: 135e6 })[0]).toContain('Transformer')
  })
})

describe('a conversation', () => {
  beforeEach(() => vi.stubGlobal('location', { origin: 'http://localhost:8000' }))
  afterEach(() => vi.unstubAllGlobals())

  it('keeps what was said before an edit or another answer, beside it', () => {
    const talk = talked()
    const other = add(talk, { role: 'assistant', content: 'Good day', parent: 0 })
    expect(path(talk)).toEqual([0, 3])
    expect(siblings(talk, other)).toEqual([1, 3])
    show(talk, 1)
    expect(path(talk)).toEqual([0, 1, 2]) // and what followed it
    expect(messages(talk, 1).map(({ content }) => content)).toEqual(['Be kind.', 'Hello\nthere', 'Hi'])
    expect(title(talk)).toBe('Hello there')
  })

  it('comes back from a link and from a file, and from messages as others write them', () => {
    const talk = talked()
    expect(messages(unlink(link(talk)))).toEqual(messages(talk))
    expect(imported(exported([talk]))).toEqual([talk])
    const [other] = imported(JSON.stringify(messages(talk)))
    expect(messages(other)).toEqual(messages(talk))
    talk.turns[0].content = 'x'.repeat(9000)
    expect(link(talk)).toEqual([]) // too long for an address
  })

  it('is not taken from what is none', () => {
    for (const wrong of ['no JSON', '[]', '{}', '[{"role": "tool", "content": "x"}]', '{"conversations": [1]}'])
      expect(() => imported(wrong)).toThrow(/file/)
    const talk = talked()
    expect(checked({ ...talk, id: '../../x' })).toBeNull()
    expect(checked({ ...talk, turns: [{ role: 'user', content: 'x', parent: 0 }] })).toBeNull() // follows itself
    expect(checked({ ...talk, leaf: 99 })?.leaf).toBe(-1)
  })

  it('is the same in code', () => {
    const code = codeOf({ id: 'small', source: 'models/small' }, messages(talked(), 0), {
      max_tokens: 9,
      temperature: 0,
    })
    expect(code.shell).toBe(
      "heedful chat 'Hello\nthere' --model models/small --system 'Be kind.' --temperature 0 --max-tokens 9",
    )
    expect(code.python).toContain('model.stream(messages, chat=True, max_tokens=9, temperature=0)')
    const { python, shell } = codeOf({ id: 'small', source: 'small' }, messages(talked(), 0), {
      max_tokens: 9,
      temperature: 0,
      ...askedOf({ schema: '{"type": "object"}', tools: '' }).asked,
    })
    expect(python).toContain('schema = {"type": "object"}')
    expect(python).toContain('temperature=0, schema=schema)')
    expect(shell).toMatch(/^echo '\{"type":"object"\}' > schema.json\nheedful chat .* --schema schema.json$/s)
  })
})

const CALL = {
  id: 'call_1',
  type: 'function' as const,
  function: { name: 'get_weather', arguments: '{"city": "Rome"}' },
}

function called() {
  const talk = fresh({ schema: written(SCHEMAS[0].schema), tools: written(WEATHER), must: true })
  const asked = add(talk, { role: 'user', content: 'Is it warm in Rome?', parent: -1 })
  const calls = add(talk, { role: 'assistant', content: '', parent: asked, end: 'tool_calls', tool_calls: [CALL] })
  const result = add(talk, { role: 'tool', content: '31', parent: calls, tool_call_id: 'call_1' })
  add(talk, { role: 'assistant', content: '{"name": "Rome"}', parent: result, json: true })
  return talk
}

describe('what is typed at the side', () => {
  it('is sent as the API wants it, or said to be wrong, with the place', () => {
    expect(askedOf({ schema: ' ', tools: '' })).toEqual({ asked: {}, problem: '' })
    const { asked, problem } = askedOf(called())
    expect(problem).toBe('')
    expect(asked.response_format?.json_schema.schema).toEqual(SCHEMAS[0].schema)
    expect(asked).toMatchObject({ tools: WEATHER, tool_choice: 'required' })
    expect(parsed('{\n  "a": [1, 2,],\n}').problem).toBe('Line 2, column 14: ], is not JSON here.')
    expect(parsed('{"a" 1}').problem).toBe('Line 1, column 6: 1} is not JSON here.')
    expect(parsed("{'a': true, 'b': false}").problem).toBe("Line 1, column 2: 'a': true, … is not JSON here.")
    expect(parsed('[1] [2]').problem).toBe('Line 1, column 5: [2] is not JSON here.')
    expect(parsed('{"a": {"b": [1, ').problem).toBe('This JSON is not complete.')
    expect(parsed('['.repeat(20_000)).problem).not.toBe('')
    expect(askedOf({ schema: '[]', tools: '' }).problem).toMatch('The schema: A schema is an object')
    expect(toolsOf('{}').problem).toMatch('Tools are a list')
    expect(toolsOf(`[${JSON.stringify(WEATHER[0])}, {"name": "x"}]`).problem).toMatch('Tool 2 needs')
  })

  it('is shown with a line for each value, numbers and all as they were', () => {
    const value = { a: [1, { b: 'x, "y": {' }, [], {}], c: null, d: -1.5e300 }
    expect(indented(JSON.stringify(value))).toBe(JSON.stringify(value, null, 2))
    expect(indented('{"n": 12345678901234567890.0')).toBe('{\n  "n": 12345678901234567890.0')
    expect(argumentsOf('{"city": "Rome", "days": [1, 2]}')).toEqual([
      ['city', 'Rome'],
      ['days', '[1,2]'],
    ])
    expect(argumentsOf('{"city": "Ro')).toBeNull()
    expect(JSON.parse(written(WEATHER))).toEqual(WEATHER)
    expect(written(SCHEMAS[1].schema)).toContain('\n    "stars": {\n      "type": "integer",\n      "minimum": 1,')
    expect(written(SCHEMAS[0].schema)).toContain('\n    "city": {"type": "string"}\n')
  })
})

describe('tools', () => {
  it('are called piece by piece', () => {
    const calls: (typeof CALL)[] = []
    takeCalls(calls, [{ index: 0, id: 'call_1', function: { name: 'get_weather', arguments: '' } }])
    takeCalls(calls, [{ index: 0, function: { arguments: '{"city": ' } }])
    takeCalls(calls, [
      { index: 0, function: { arguments: '"Rome"}' } },
      { index: 1, id: 'call_2', function: { name: 'now', arguments: '{}' } },
    ])
    expect(calls).toEqual([CALL, { id: 'call_2', type: 'function', function: { name: 'now', arguments: '{}' } }])
  })

  it('stay in a conversation, in its link and its file, and as OpenAI writes them', () => {
    const talk = called()
    expect(imported(exported([talk]))).toEqual([talk])
    expect(promptOf(unlink(link(talk)))).toEqual(promptOf(talk))
    expect(unlink(link(talk))).toMatchObject({ schema: talk.schema, tools: talk.tools, must: true })
    expect(promptOf(talk).messages.slice(1, 3)).toEqual([
      { role: 'assistant', content: '', tool_calls: [CALL] },
      { role: 'tool', content: '31', tool_call_id: 'call_1' },
    ])
    const [other] = imported(JSON.stringify([{ role: 'assistant', content: null, tool_calls: [CALL] }]))
    expect(other.turns[0].tool_calls).toEqual([CALL])
    expect(toolOf(talk, 2)).toBe('get_weather')
    expect(transcript(talk)).toContain('assistant: get_weather({"city": "Rome"})')
    expect(unlink(['no JSON']).turns).toEqual([])
  })

  it('are edited as JSON', () => {
    expect(callsOf(callsText([CALL]).replace('Rome', 'Oslo'), [CALL]).value).toEqual([
      { ...CALL, function: { name: 'get_weather', arguments: '{"city":"Oslo"}' } },
    ])
    for (const wrong of ['[]', '{}', '[{"name": "x"}]', '[{']) expect(callsOf(wrong, [CALL]).problem).not.toBe('')
  })
})

describe('tokens of a reply', () => {
  it('are put together where a character is cut', () => {
    const tokens = new Tokens()
    const [one, two] = [bytes('👍').slice(0, 2), bytes('👍').slice(2)]
    const entry = (token: string, raw: number[]) => ({ token, logprob: Math.log(0.5), bytes: raw, top_logprobs: [] })
    tokens.take([entry(' ok', bytes(' ok')), entry('\\xf0\\x9f', one)])
    tokens.take([entry('\\x91\\x8d', two)])
    expect(tokens.pieces.map(({ text, token }) => [text, token])).toEqual([
      [' ok', ' ok'],
      ['', 'bytes:\\xf0\\x9f'],
      ['👍', 'bytes:\\x91\\x8d'],
    ])
  })
})

describe('a stream that breaks off', () => {
  afterEach(() => vi.unstubAllGlobals())

  const serve = (body: ReadableStream) => {
    vi.stubGlobal('document', { baseURI: 'http://localhost/' })
    vi.stubGlobal('sessionStorage', { getItem: () => null })
    vi.stubGlobal('fetch', async () => new Response(body))
  }
  async function all() {
    const found = []
    for await (const chunk of api.chat({ messages: [] })) found.push(chunk)
    return found
  }
  const event = new TextEncoder().encode('data: {"choices": []}\n\n')

  it('is said in words, whether the connection fails or just ends', async () => {
    serve(
      new ReadableStream({
        start: (to) => to.enqueue(event),
        pull: (to) => to.error(new TypeError('network error')),
      }),
    )
    await expect(all()).rejects.toEqual(new ApiError('The connection to the server broke off. Is it still running?', 0))
    serve(new ReadableStream({ start: (to) => (to.enqueue(event), to.close()) }))
    await expect(all()).rejects.toThrow('broke off')
  })
})

describe('two windows of one conversation', () => {
  it('each keep what the other has said, whoever writes last', () => {
    const begun = fresh()
    add(begun, { role: 'user', content: 'a', parent: -1 })
    const [here, there] = [structuredClone(begun), structuredClone(begun)]
    add(here, { role: 'user', content: 'b', parent: 0 })
    add(there, { role: 'user', content: 'c', parent: 0 })
    add(there, { role: 'assistant', content: 'd', parent: 1, end: 'stop' })
    expect(merge(here, there)).toBe(true) // it has more, to be kept again
    expect(merge(there, here)).toBe(false)
    const said = (talk: Talk) => path(talk).map((i) => talk.turns[i].content)
    expect(said(here)).toEqual(['a', 'b'])
    expect(said(there)).toEqual(['a', 'c', 'd'])
    for (const talk of [here, there])
      expect(talk.turns.map(({ content }) => content).sort()).toEqual(['a', 'b', 'c', 'd'])
    add(there, { role: 'user', content: 'e', parent: there.leaf })
    expect(merge(begun, there)).toBe(false)
    expect(said(begun)).toEqual(['a', 'c', 'd', 'e']) // what is shown was continued
  })
})
