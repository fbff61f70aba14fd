import { afterEach, describe, expect, it, vi } from 'vitest'
import { api } from '../src/lib/api'
import { mean, slice, softmax, transpose, unpack, type Bytes, type Numbers } from '../src/lib/arrays'
import { call, curl, heedful, py, sh } from '../src/lib/code'
import { hue, ink, table, tint } from '../src/lib/colours'
import { csv, matrixRows } from '../src/lib/csv'
import { count, number, percent, visible } from '../src/lib/format'
import { endOf, first, last, tooMany } from '../src/lib/long'
import { events } from '../src/lib/sse'
import { Waiting } from '../src/lib/waiting.svelte'
import { changed, makeHash, parseHash, read, write } from '../src/lib/url'

const STRANGE = [
  '',
  ' ',
  'a b+c&d=e?f#g%20',
  '<script>alert(1)</script>',
  'é 日本 👍',
  '\n\t"\'`$(rm -rf)\\',
  '#/x?model=y',
]

describe('addresses', () => {
  it('give back what was put in', () => {
    for (const text of STRANGE) {
      const place = { tab: 'attention', params: { model: 'shakespeare', text, layer: '2' } }
      expect(parseHash(makeHash(place))).toEqual(place)
    }
  })
  it('are readable', () => expect(makeHash({ tab: 'write', params: { text: 'To be' } })).toBe('#/write?text=To%20be'))
  it('may be empty or nonsense', () => {
    expect(parseHash('')).toEqual({ tab: '', params: {} })
    expect(parseHash('#/runs')).toEqual({ tab: 'runs', params: {} })
    expect(parseHash('#%%%?%=%').tab).toBe('%%%')
  })
  it('keep settings of every kind, and only those that differ', () => {
    const usual = { layer: 0, view: 'heads', hide: false, masked: [] as number[], words: ['a'] }
    const now = { layer: 3, view: 'heads', hide: true, masked: [1, 5], words: ['x,y', '"'] }
    const params = changed(now, usual)
    expect(Object.keys(params)).toEqual(['layer', 'hide', 'masked', 'words'])
    for (const [name, value] of Object.entries(usual))
      expect(read(params[name], value)).toEqual(now[name as keyof typeof now])
  })
  it('that make no sense fall back to the default', () => {
    expect(read('many', 3)).toBe(3)
    expect(read('', 3)).toBe(3)
    expect(read('NaN', 3)).toBe(3)
    expect(read('yes', false)).toBe(false)
    expect(read('{"a":1}', [1])).toEqual([1])
    expect(read('["a"]', [1])).toEqual([1])
    expect(read('[', ['b'])).toEqual(['b'])
    expect(read(write([]), [7])).toEqual([])
  })
})

describe('arrays', () => {
  it('are found after the JSON, wherever they are in a reply, and are not copied', () => {
    const said = {
      tokens: [{ id: 1 }],
      layers: [{ q: { shape: [1, 2], dtype: 'float32', at: 4 } }],
      small: { shape: [3], dtype: 'uint8', at: 0 },
      none: null,
      at: 'noon',
    }
    let text = JSON.stringify(said)
    text += ' '.repeat((4 - (text.length % 4)) % 4)
    const raw = new Uint8Array(4 + text.length + 12)
    raw.set([text.length & 255, text.length >> 8], 0)
    raw.set(new TextEncoder().encode(text), 4)
    raw.set([7, 0, 255, 0, /* 1 and -2, by struct.pack("<2f", 1, -2) */ 0, 0, 128, 63, 0, 0, 0, 192], 4 + text.length)
    const reply = unpack(raw.buffer) as { layers: { q: Numbers }[]; small: Bytes; tokens: unknown; at: string }
    expect(reply.layers[0].q).toEqual({ shape: [1, 2], data: new Float32Array([1, -2]) })
    expect(reply.layers[0].q.data.buffer).toBe(raw.buffer)
    expect([...reply.small.data]).toEqual([7, 0, 255])
    expect([reply.tokens, reply.at]).toEqual([[{ id: 1 }], 'noon'])
  })
  it('are cut, averaged, turned', () => {
    const array = { shape: [2, 2, 3], data: Float32Array.from({ length: 12 }, (_, i) => i) }
    expect([...slice(array, 1, 0).data]).toEqual([6, 7, 8])
    expect(slice(array, 1).shape).toEqual([2, 3])
    expect([...mean(array).data]).toEqual([3, 4, 5, 6, 7, 8])
    expect([...transpose(slice(array, 0)).data]).toEqual([0, 3, 1, 4, 2, 5])
    expect(() => slice(array, 2)).toThrow(RangeError)
  })
  it('softmax sums to one, whatever the size of the logits', () => {
    const p = softmax([1000, 1001, -1000], 0.5)
    expect(p[0] + p[1] + p[2]).toBeCloseTo(1, 6)
    expect(p[1] / p[0]).toBeCloseTo(Math.exp(2), 4)
  })
})

describe('csv', () => {
  it('quotes what needs it', () => {
    expect(
      csv([
        { a: 'x,y', b: 1.5 },
        { a: 'he said "no"\n', b: -2 },
      ]),
    ).toBe('a,b\r\n"x,y",1.5\r\n"he said ""no""\n",-2\r\n')
  })
  it('never becomes a formula', () =>
    expect(csv([{ a: '=1+1' }, { a: '@x' }, { a: -1 }])).toBe("a\r\n'=1+1\r\n'@x\r\n-1\r\n"))
  it('has a column for each name, missing cells empty', () =>
    expect(csv([{ a: 1 }, { b: null }])).toBe('a,b\r\n1,\r\n,\r\n'))
  it('tells equal columns of a matrix apart', () => {
    const rows = matrixRows([1, 2, 3, 4], ['x', 'y'], ['a', 'a'], 'from')
    expect(csv(rows)).toBe('from,a,a (1)\r\nx,1,2\r\ny,3,4\r\n')
  })
})

describe('code', () => {
  it('python', () => {
    expect(
      call('model.generate', ['To "be"\n'], { temperature: 0.8, seed: undefined, stop: ['\\'], greedy: true }),
    ).toBe('model.generate("To \\"be\\"\\n", temperature=0.8, stop=["\\\\"], greedy=True)')
    expect(py({ a: null })).toBe('{"a": None}')
    expect(py('a\u202eb\u0000')).toBe('"a\\u202eb\\u0000"')
  })
  it('shell', () => {
    expect(sh('plain-1.5')).toBe('plain-1.5')
    expect(sh("it's $(rm) `x`")).toBe(`'it'\\''s $(rm) \`x\`'`)
    expect(sh('')).toBe("''")
    expect(heedful('generate', ['tiny', 'To be'], { temperature: 0.5, json: true, top: undefined, quiet: false })).toBe(
      "heedful generate tiny 'To be' --temperature 0.5 --json",
    )
  })
  it('curl', () => {
    expect(curl('/v1/completions', { prompt: "it's" }, 'http://localhost:8000')).toBe(
      `curl http://localhost:8000/v1/completions \\\n  -H 'Content-Type: application/json' \\\n  -d '{"prompt":"it'\\''s"}'`,
    )
  })
})

describe('server-sent events', () => {
  it('are found however the bytes are cut', async () => {
    const raw = new TextEncoder().encode('data: {"text":"日本"}\n\n: a comment\n\ndata: [DONE]\n\n')
    for (const size of [1, 2, 7, 1000]) {
      const body = new ReadableStream<Uint8Array>({
        start(control) {
          for (let i = 0; i < raw.length; i += size) control.enqueue(raw.slice(i, i + size))
          control.close()
        },
      })
      const found: string[] = []
      for await (const data of events(body)) found.push(data)
      expect(found).toEqual(['{"text":"日本"}', '[DONE]'])
    }
  })
})

describe('words for numbers', () => {
  it('percent', () =>
    expect([1, 0.5, 0.0512, 0.00123, 1e-9, 0].map(percent)).toEqual([
      '100 %',
      '50 %',
      '5.1 %',
      '0.12 %',
      '< 0.01 %',
      '0 %',
    ]))
  it('number', () =>
    expect([0, -1.2345, 1e-5, Infinity, NaN, 123456].map(number)).toEqual([
      '0',
      '−1.23',
      '1.0e−5',
      '∞',
      'NaN',
      '123000',
    ]))
  it('count', () => expect([6048, 2731392, 12].map(count)).toEqual(['6.05 k', '2.73 M', '12']))
  it('tokens', () => expect([' a b ', '\n', ''].map(visible)).toEqual(['·a b·', '⏎', '∅']))
})

describe('colours', () => {
  it('begin at the paper and end far from it', () => {
    expect(tint(0, false)).toBe('rgb(250 248 245)')
    expect(tint(2, false)).toBe(tint(1, false))
    expect([...table('diverging', true).slice(0, 4)]).toEqual([150, 205, 255, 255])
    expect(new Set([0, 1, 2, 3].map((i) => hue(i, 4, true))).size).toBe(4)
  })
  it('have readable text on them', () => {
    for (const dark of [false, true])
      for (let t = 0; t <= 1; t += 0.05) expect(contrast(tint(t, dark), ink(t, dark))).toBeGreaterThan(4.5)
  })
})

function contrast(a: string, b: string): number {
  const [high, low] = [a, b].map(luminance).sort((x, y) => y - x)
  return (high + 0.05) / (low + 0.05)
}
function luminance(colour: string): number {
  const parts = colour.startsWith('#')
    ? [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16))
    : colour.match(/\d+/g)!.map(Number)
  const [r, g, b] = parts.map((x) => (x / 255 <= 0.04045 ? x / 255 / 12.92 : ((x / 255 + 0.055) / 1.055) ** 2.4))
  return 0.2126 * r + 0.7152 * g + 0.0722 * b
}

describe('a model that does not answer at once', () => {
  afterEach(() => {
    vi.useRealTimers()
    vi.restoreAllMocks()
  })

  it('is said to be loading if it is, until it answers', async () => {
    vi.useFakeTimers()
    const models = (loaded: boolean) => ({ models: [{ id: 'big', loaded }], pullable: [] }) as never
    const asked = vi.spyOn(api, 'models').mockResolvedValue(models(false))
    const waiting = new Waiting()
    waiting.begin('big')
    waiting.end() // it answered at once: nobody asks
    await vi.advanceTimersByTimeAsync(1000)
    expect([asked.mock.calls.length, waiting.said]).toEqual([0, ''])
    waiting.begin('big')
    await vi.advanceTimersByTimeAsync(1000)
    expect(waiting.said).toBe('Loading big: its first answer takes some seconds.')
    waiting.end()
    expect(waiting.said).toBe('')
    asked.mockResolvedValue(models(true))
    waiting.begin('big')
    await vi.advanceTimersByTimeAsync(1000)
    expect(waiting.said).toBe('') // it is there, and slow
  })
})

describe('a text that is too long', () => {
  it('has its end kept, by words, and in no more tokens than are read', () => {
    const text = 'word '.repeat(100).trim()
    const end = endOf(text, 100, 50)
    expect(text.endsWith(end) && end.startsWith('word')).toBe(true)
    expect(end.split(' ').length).toBeLessThanOrEqual(50)
    expect(end.split(' ').length).toBeGreaterThan(40)
    expect(endOf(text, 40, 50)).toBe(text)
    expect(tooMany(1200, 512)).toBe('The text has 1,200 tokens, and at most 512 are read here: shorten it.')
  })
  it('is not cut inside of a character', () => {
    expect(last('a👍b', 2)).toBe('b')
    expect(first('a👍b', 2)).toBe('a')
  })
})
