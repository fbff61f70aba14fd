import { describe, expect, it } from 'vitest'
import type { Model, Token } from '../src/lib/api'
import { nothingCame } from '../src/tabs/complete/how'
import { restore, told } from '../src/tabs/complete/link'
import { echoed, Gathered, perToken, sayable } from '../src/tabs/complete/pieces'
import { starters } from '../src/tabs/complete/starters'
import { Tree } from '../src/tabs/complete/tree.svelte'
import { edited, joined, segments } from '../src/tabs/write/marks'
import { fit } from '../src/tabs/write/prompt'

const logprobs = (tokens: string[], text_offset: number[]) => ({
  tokens,
  text_offset,
  token_logprobs: tokens.map((_, i) => (i ? Math.log(0.5) : null)),
  top_logprobs: tokens.map((token, i) => (i ? { [token]: Math.log(0.5), other: Math.log(0.25) } : null)),
})
const token = (id: number, special = false): Token => ({ id, text: 'a', raw: special ? '<s>' : 'a', special })

describe('a tree in a link', () => {
  it('comes back with who wrote what, how likely, and which one is shown', () => {
    const [tree, again] = [new Tree(), new Tree()]
    const piece = { text: ' be', token: ' be', probability: 0.25, top: [] }
    const prompt = tree.place('To é👍"\n')
    tree.grow(prompt, 'one', ' be', [piece])
    tree.current = tree.grow(prompt, 'two', ' see')
    restore(again, told(tree).text)
    expect(again.rows.map(({ branch, depth }) => [branch.text, branch.by, branch.chance, depth])).toEqual([
      ['To é👍"\n', null, null, 0],
      [' be', 'one', 0.25, 1],
      [' see', 'two', null, 1],
    ])
    expect(again.textOf(again.current)).toBe('To é👍"\n see')
    expect(told(again)).toEqual(told(tree))
  })
  it('is not there where the text says all, and leaves one way where it is too large', () => {
    const tree = new Tree()
    tree.current = tree.place('typed')
    expect(told(tree)).toEqual({ text: '', whole: true })
    for (let i = 0; i < 30; i++) tree.grow(tree.current, 'm', `${i}`.repeat(400))
    tree.current = tree.leaves[2]
    const { text, whole } = told(tree)
    expect(whole).toBe(false)
    const again = new Tree()
    restore(again, text)
    expect(again.textOf(again.current)).toBe(tree.textOf(tree.current))
    expect(again.rows).toHaveLength(2)
  })
})

describe('a tree of texts', () => {
  it('parts where texts part, between words', () => {
    const tree = new Tree()
    tree.current = tree.place('The old king')
    const first = (tree.current = tree.grow(tree.current, 'm', ' slept well'))
    expect(tree.textOf(first)).toBe('The old king slept well')
    const other = tree.place('The old knight')
    expect(tree.textOf(other)).toBe('The old knight')
    expect(other.parent!.text).toBe('The old ')
    expect(tree.textOf(first)).toBe('The old king slept well')
    expect(tree.place('The old king slept well')).toBe(first)
    expect(tree.place('A new one').parent).toBe(tree.root)
    expect(tree.leaves).toHaveLength(3)
  })
  it('finds a text that ends inside of a branch, and one that goes on behind it', () => {
    const tree = new Tree()
    const first = (tree.current = tree.place('one two three'))
    expect(tree.textOf(tree.place('one t'))).toBe('one t')
    expect(tree.textOf(first)).toBe('one two three')
    expect(tree.textOf(tree.place('one two three four'))).toBe('one two three four')
    expect(tree.rows.filter(({ branch }) => branch.text === '')).toEqual([])
  })
  it('is split at a token with its probabilities', () => {
    const tree = new Tree()
    const prompt = tree.place('To')
    const piece = (text: string) => ({ text, token: text, probability: 0.5, top: [] })
    const answer = (tree.current = tree.grow(prompt, 'm', ' be or', [piece(' be'), piece(' or')]))
    const upper = tree.splitAt(answer, 5)
    expect([upper.text, answer.text]).toEqual([' be', ' or'])
    expect([upper.pieces?.length, answer.pieces?.length]).toEqual([1, 1])
    expect(tree.splitAt(answer, 2)).toBe(prompt)
    expect(tree.splitAt(answer, 0)).toBe(tree.root)
    tree.remove(upper)
    expect(tree.current).toBe(prompt)
  })
  it('gives back any text that was put in', () => {
    const tree = new Tree()
    const texts = ['a', 'ab', 'a b', 'a b c', 'a c', '', 'b', 'a b c d', ' a', 'a  b', '👍 a', '👍 b']
    for (const text of texts) {
      tree.current = tree.place(text)
      expect(tree.textOf(tree.current)).toBe(text)
      if (text) tree.current = tree.grow(tree.current, 'm', ' b x')
    }
    for (const text of texts) expect(tree.textOf(tree.place(text))).toBe(text)
  })
})

describe('tokens of an answer', () => {
  it('have their part of the text, also where a character has two units', () => {
    const gathered = new Gathered()
    gathered.take({
      index: 0,
      text: 'a👍',
      finish_reason: null,
      logprobs: logprobs(['a', 'bytes:\\xf0', 'bytes:\\x9f'], [0, 1, 1]),
    })
    gathered.take({ index: 0, text: 'b', finish_reason: null, logprobs: logprobs(['b'], [2]) })
    expect(gathered.pieces.map((piece) => piece.text)).toEqual(['a', '', '👍', 'b'])
    expect(gathered.pieces[1].top.map((one) => one.probability)).toEqual([0.5, 0.25])
  })
  it('are put to a prompt that was cut, or is not all known to the model', () => {
    expect(echoed('xab', 'ab', logprobs(['a', 'b'], [0, 1])).map((piece) => piece.text)).toEqual(['x', 'a', 'b'])
    expect(echoed('aéb', 'ab', logprobs(['a', '<unk>', 'b'], [0, 1, 1])).map((piece) => piece.text)).toEqual([
      'a',
      'é',
      'b',
    ])
  })
  it('have a mean, and some cannot be said', () => {
    expect(perToken(echoed('ab', 'ab', logprobs(['a', 'b'], [0, 1])))).toBeCloseTo(0.5)
    expect(perToken([])).toBeNull()
    expect(['<|endoftext|>', '</s>', 'bytes:\\xe2', ' the', '<', '\n'].map(sayable)).toEqual([
      false,
      false,
      false,
      true,
      true,
      true,
    ])
  })
})

describe('what a model wrote', () => {
  const shown = (text: string, marks: { start: number; end: number }[]) =>
    segments(text, marks)
      .map((part) => (part.marked ? `[${part.text}]` : part.text))
      .join('')
  it('stays marked while the text around it is edited', () => {
    const marks = [{ start: 2, end: 5 }]
    expect(shown('ab[cde]fg'.replace(/[[\]]/g, ''), marks)).toBe('ab[cde]fg')
    expect(shown('Xabcdefg', edited(marks, 'abcdefg', 'Xabcdefg'))).toBe('Xab[cde]fg')
    expect(shown('abcXdefg', edited(marks, 'abcdefg', 'abcXdefg'))).toBe('ab[c]X[de]fg')
    expect(shown('abefg', edited(marks, 'abcdefg', 'abefg'))).toBe('ab[e]fg')
    expect(edited(marks, 'abcdefg', '')).toEqual([])
    expect(
      joined([
        { start: 3, end: 6 },
        { start: 0, end: 3 },
        { start: 9, end: 9 },
      ]),
    ).toEqual([{ start: 0, end: 6 }])
  })
})

describe('a prompt', () => {
  it('is sent whole where it fits, and else its end, with the token that begins all texts', () => {
    const tokens = [token(1, true), ...Array.from({ length: 19 }, (_, i) => token(10 + i))]
    expect(fit('text', tokens, null, 50).prompt).toBe('text')
    expect(fit('text', tokens, 70, 50)).toEqual({ prompt: 'text', max_tokens: 50, read: 20, total: 20 })
    expect(fit('text', tokens, 32, 50)).toEqual({
      prompt: [1, ...Array.from({ length: 15 }, (_, i) => 14 + i)],
      max_tokens: 16,
      read: 16,
      total: 20,
    })
    expect(fit('text', tokens, 64, 60)).toEqual({ prompt: 'text', max_tokens: 44, read: 20, total: 20 })
    expect(fit('text', tokens, 16, 0).prompt).toHaveLength(16)
  })
})

describe('prompts to start from', () => {
  const model = (parameters: number, chat = false) =>
    ({ id: 'shakespeare', kind: 'decoder', image: null, parameters, chat }) as Model
  it('fit the model: a small one gets no examples to learn from, and no stop sequence', () => {
    const small = starters(model(3e6)).filter(({ beyond }) => !beyond)
    expect(small.length).toBeGreaterThan(2)
    expect(small.every(({ stop, text }) => !stop.length && text)).toBe(true)
    expect(starters(model(1e8)).filter(({ beyond, stop }) => !beyond && stop.length)).toHaveLength(4)
    expect(starters(model(3e6, true)).some(({ beyond }) => beyond)).toBe(false)
  })
  it('say why nothing came', () => {
    expect(nothingCame('books', [])).toContain('ends here')
    expect(nothingCame('books', ['\n', '.'])).toContain('stop sequence “⏎” or “.”')
  })
})
