import { describe, expect, it } from 'vitest'
import {
  chanceTicks,
  differences,
  layOut,
  nearest,
  pairs,
  ranking,
  ratioTicks,
  striking,
  told,
  type Filled,
} from '../src/tabs/fill/compare'
import { biasCode, bodyOf, EXAMPLES, named } from '../src/tabs/fill/bias'
import { place, usualBlank } from '../src/tabs/fill/pieces'
import { aroundBlank, merged, plain, withBlank } from '../src/tabs/fill/template'
import { madeFor, segments, tellsLanguages } from '../src/tabs/tasks/panel'
import type { Model, Token } from '../src/lib/api'

const token = (text: string, special = false): Token => ({ id: 0, text, raw: text, special })
const filled: Filled = {
  sentences: [
    { text: 'In 1808 he was _.', model: 'bert', choices: ['1808', 'he'] },
    { text: 'In 1808 she was _.', model: 'bert', choices: ['1808', 'she'] },
  ],
  words: ['king', 'queen', 'here'],
  logprobs: { shape: [2, 3], data: Float32Array.from([-1, -5, -2, -4, -1, -2]) },
  note: null,
}

describe('templates', () => {
  it('are made of two sentences that differ on one side of the blank', () => {
    expect(merged('He worked as a _.', 'She worked as a _.')).toBe('[He|She] worked as a _.')
    expect(merged('A _ ran home.', 'A _ ran away fast.')).toBe('A _ ran [home.|away fast.]')
    expect(merged('In London they buy _.', 'In they buy _.')).toBe('In [London |]they buy _.')
    for (const [a, b] of [
      ['A _ b', 'C _ d'],
      ['same _', 'same _'],
      ['no blank', 'a _'],
      ['[a|b] _', 'c _'],
      ['_ and _', 'a _'],
    ])
      expect(merged(a, b)).toBe(null)
  })
  it('have a blank that touches no letter', () => {
    expect(aroundBlank('snake_case is _.')).toEqual(['snake_case is ', '.'])
    expect(withBlank('a [b] word.', 6, 10)).toBe('a \\[b\\] _.')
    expect(withBlank('hello', 1, 2)).toBe(null)
    expect(plain('a_b|c\\')).toBe('a\\_b\\|c\\\\')
  })
})

describe('groups', () => {
  const typed = { sentences: 'My friend {NAME} is a {JOB}.\n', groups: '', values: '', words: '', label: '' }
  it('are a line each, with commas between their members', () => {
    expect(named('women: Mary, Anna,\n\nmen = John\nnobody:\nx')).toEqual({ women: ['Mary', 'Anna'], men: ['John'] })
  })
  it('make a request of what is not empty and has a place', () => {
    const values = 'JOB: nurse, judge\nAGE: old'
    expect(bodyOf('m', { ...typed, groups: 'a: x\nb: y', values, words: 'w', label: 'good' }, true)).toEqual({
      model: 'm',
      templates: ['My friend {NAME} is a {JOB}.'],
      groups: { a: ['x'], b: ['y'] },
      fill: { JOB: ['nurse', 'judge'] },
      label: 'good',
    })
    expect(bodyOf('m', { ...typed, sentences: '[He|She] is _', groups: 'a: x', words: 'w' }, false)).toEqual({
      model: 'm',
      templates: ['[He|She] is _'],
      words: ['w'],
    })
    expect(bodyOf('m', { ...typed, sentences: ' ' }, false)).toBe(null)
  })
  it('are the same on the command line', () => {
    const body = bodyOf('m', { ...typed, groups: "a: it's\nb: y", values: 'JOB: nurse' }, true)!
    expect(biasCode(body, body!.model, 'http://here').shell).toBe(
      `heedful bias m 'My friend {NAME} is a {JOB}.' --group 'a=it'\\''s' --group b=y --fill JOB=nurse --out bias.html`,
    )
    expect(biasCode(body, body!.model, 'http://here').python).toContain('fill={"JOB": ["nurse"]}')
  })
  it('have examples with groups', () => {
    for (const example of [...EXAMPLES.words, ...EXAMPLES.labels])
      expect(Object.keys(named(example.groups)).length).toBeGreaterThan(1)
  })
})

describe('tokens in their text', () => {
  it('are found whatever the tokenizer changed', () => {
    const text = 'Café  Noir, unlikely!'
    const found = place(text, [
      token('[CLS]', true),
      token('cafe'),
      token('noir'),
      token(','),
      token('un'),
      token('##likely'),
      token('!'),
      token('[SEP]', true),
    ])
    expect(found!.map(({ begin, end }) => text.slice(begin, end))).toEqual(['Café', 'Noir', ',', 'un', 'likely', '!'])
    expect(found!.map(({ index }) => index)).toEqual([1, 2, 3, 4, 5, 6])
    const pieces = place('Ein Hund', [token(' Ein'), token(' Hund')])!
    expect(pieces.map(({ begin, end }) => [begin, end])).toEqual([
      [0, 3],
      [4, 8],
    ])
    expect(
      place(
        'a b\nc',
        ['a', '␣', 'b', '⏎', 'c'].map((t) => token(t)),
      )!.map(({ begin }) => begin),
    ).toEqual([0, 1, 2, 3, 4])
  })
  it('are not, where one is none of the text', () => expect(place('a 日', [token('a'), token('[UNK]')])).toBe(null))
  it('begin with the last word', () => {
    expect(usualBlank([token('[CLS]', true), token('a'), token('word'), token('.'), token('[SEP]', true)])).toBe(2)
    expect(usualBlank([token('!')])).toBe(0)
    expect(usualBlank([])).toBe(-1)
  })
})

describe('comparisons', () => {
  it('tell how much likelier a word is', () => {
    expect([...differences(filled, [0, 1])]).toEqual([-3, 4, 0])
    expect([...ranking(differences(filled, [0, 1]))]).toEqual([1, 2, 0])
    expect(
      striking(differences(filled, [0, 1]), Float32Array.from([-1, -5, -2]), Float32Array.from([-4, -1, -2]))[2],
    ).toBe(2)
    expect(told(filled, [0, 1])).toEqual({ a: 'he', b: 'she', common: '1808' })
    expect(pairs(4)).toHaveLength(6)
  })
  it('have ticks that are round', () => {
    expect(chanceTicks([Math.log(0.0005), Math.log(0.5)], 9).map((tick) => tick.text)).toEqual(['10 %', '1 %', '0.1 %'])
    expect(chanceTicks([Math.log(1e-8), 0], 3).map((tick) => tick.text)).toEqual(['1', '10⁻³', '10⁻⁶'])
    expect(ratioTicks(Math.log(5), 5).map((tick) => tick.text)).toEqual(['1×', '2×', '2×', '4×', '4×'])
  })
  it('have labels that do not overlap and stay inside', () => {
    const n = 200
    const px = Float32Array.from({ length: n }, (_, i) => (i * 37) % 300)
    const py = Float32Array.from({ length: n }, (_, i) => (i * 91) % 300)
    const words = Array.from({ length: n }, (_, i) => `word${i}`)
    const room = { width: 300, height: 300, font: 12, measure: (text: string) => 7 * text.length, radius: 2 }
    const many = Array.from({ length: 100 }, (_, i) => `w${i}`)
    const [x, y] = [Float32Array.from(many, () => -2), Float32Array.from(many, () => -2.5)]
    ;[x[7], y[7], x[9], y[9]] = [-30, -20, -18, -29] // the outermost of both sides, rare as they are
    const order = striking(
      y.map((q, i) => q - x[i]),
      x,
      y,
    )
    expect(order.slice(0, 2)).toEqual([7, 9])
    const edge = [px.map(() => 295), py.map((_, i) => 20 + 40 * i)]
    expect(layOut([0, 1], 2, many, edge[0], edge[1], () => false, room).map(({ index }) => index)).toEqual([0, 1])
    const placed = layOut([...words.keys()], 40, words, px, py, (i) => i % 2 === 0, room)
    expect(placed.length).toBeGreaterThan(10)
    const boxes = placed.map(({ x, y, anchor, index }) => {
      const wide = 7 * words[index].length
      const left = anchor === 'start' ? x : anchor === 'end' ? x - wide : x - wide / 2
      return { left, right: left + wide, top: y - 6, bottom: y + 6 }
    })
    for (const [i, a] of boxes.entries()) {
      expect(a.left >= 0 && a.right <= 300 && a.top >= 0 && a.bottom <= 300).toBe(true)
      for (const b of boxes.slice(i + 1))
        expect(a.right < b.left || b.right < a.left || a.bottom < b.top || b.bottom < a.top).toBe(true)
    }
  })
  it('find the nearest point', () => {
    expect(nearest(Float32Array.of(0, 10), Float32Array.of(0, 10), 8, 9, 5)).toBe(1)
    expect(nearest(Float32Array.of(0, 10), Float32Array.of(0, 10), 50, 50, 5)).toBe(null)
  })
})

describe('spans', () => {
  it('are counted in code points', () => {
    const spans = [
      { start: 2, end: 7, label: 'PER' },
      { start: 4, end: 6, label: 'LOC' },
    ]
    expect(segments('👍 Marie!', spans).map(({ text, span }) => [text, span?.label])).toEqual([
      ['👍 ', undefined],
      ['Marie', 'PER'],
      ['!', undefined],
    ])
    expect(segments('abc', [{ start: 1, end: 9 }])).toEqual([{ text: 'abc', span: null }])
  })
  it('of languages are known by their labels', () => {
    const model = (labels: string[] | null) => ({ abilities: ['classify'], labels }) as unknown as Model
    expect(tellsLanguages(model(['en', 'de', 'fr']))).toBe(true)
    for (const labels of [null, ['negative', 'positive'], ['it', 'org', 'per']])
      expect(tellsLanguages(model(labels))).toBe(false)
    const tasks = (labels: string[]) =>
      ['translate', 'classify', 'language'].filter((task) => madeFor(task, model(labels)))
    expect(tasks(['Czech', 'German', 'Korean'])).toEqual(['language'])
    expect(tasks(['negative', 'positive'])).toEqual(['classify'])
  })
})
