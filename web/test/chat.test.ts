import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest'
import { api, ApiError } from '../src/lib/api'
import { codeOf, startersOf } from '../src/tabs/chat/how'
import { Tokens } from '../src/tabs/chat/reply.svelte'
import {
  add,
  checked,
  exported,
  fresh,
  imported,
  link,
  messages,
  path,
  show,
  siblings,
  title,
  unlink,
} from '../src/tabs/chat/talk'

const bytes = (text: string) => [...new TextEncoder().encode(text)]

function talked() {
  const talk = fresh('Be kind.')
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
