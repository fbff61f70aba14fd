import { describe, expect, it } from 'vitest'
import { done, isName, parse, type Step } from '../src/lib/coach/script'
import { inline, markdown } from '../src/lib/markdown'

const SCRIPT = `# Where did street come from?

Look at **street**.

---
open: #/tasks?task=translate&text=Ein%20Hund
until: beams = 1 | 2
until: text contains Katze | Maus

Take one beam.

- - -
---

The end.
`

describe('a coach’s script', () => {
  it('is a title and steps, each with what it opens and what it waits for', () => {
    const { title, steps, problems } = parse(SCRIPT)
    expect(title).toBe('Where did street come from?')
    expect(problems).toEqual([])
    expect(steps.map(({ text }) => text.split('\n')[0])).toEqual(['Look at **street**.', 'Take one beam.', 'The end.'])
    expect(steps.map(({ open }) => open)).toEqual([null, '#/tasks?task=translate&text=Ein%20Hund', null])
    expect(steps[1].until).toEqual([
      { name: 'beams', is: '=', values: ['1', '2'] },
      { name: 'text', is: 'contains', values: ['Katze', 'Maus'] },
    ])
  })
  it('is done when all that it waits for is true', () => {
    const step = parse(SCRIPT).steps[1]
    const state = { tab: 'tasks', beams: '2', text: 'Eine katze' }
    expect(done(step, state, {})).toBe(true)
    expect(done(step, { ...state, beams: '4' }, {})).toBe(false)
    expect(done(parse(SCRIPT).steps[0], state, {})).toBe(false) // it waits for nothing: one goes on by hand
  })
  it.each([
    ['layer = 0', { layer: '0' }, { layer: '1' }],
    ['layer != 3', { layer: '0' }, { layer: '3' }],
    ['temperature > 1', { temperature: '1.2' }, { temperature: '1' }],
    ['temperature < 1', { temperature: '0' }, {}],
    ['masked is set', { masked: '[3]' }, { masked: '[]' }],
    ['text changes', { text: 'b' }, { text: 'a' }],
  ])('knows %s', (condition, yes, no) => {
    const step: Step = parse(`# T\n\n---\nuntil: ${condition}\n\nx`).steps[0]
    const before = { text: 'a' }
    expect([done(step, yes, before), done(step, no as Record<string, string>, before)]).toEqual([true, false])
  })
  it('says what it does not understand, and shows the rest', () => {
    const { steps, problems } = parse('no title\n\n---\nopen: https://example.org\nuntil: the cows come home\n\nWait.')
    expect(steps.at(-1)).toEqual({ text: 'Wait.', open: null, until: [] })
    expect(problems).toHaveLength(3)
    expect(parse('').problems).toHaveLength(2)
  })
  it('is told apart from the name of one that ships', () => {
    expect([isName('one-word'), isName('# A\n\nb'), isName('')]).toEqual([true, false, false])
  })
  it('ships in a form that is understood, four to six steps each', () => {
    const files = import.meta.glob<string>('../src/lib/coach/scripts/*.md', {
      query: '?raw',
      import: 'default',
      eager: true,
    })
    for (const [name, text] of Object.entries(files)) {
      const { steps, problems } = parse(text)
      expect(problems, name).toEqual([])
      expect(steps.length, name).toBeGreaterThanOrEqual(4)
      expect(steps.length, name).toBeLessThanOrEqual(6)
    }
  })
})

describe('Markdown', () => {
  const plain = (text: string) => [{ kind: 'text', text }]
  it('has paragraphs, headings, lists, quotes and code', () => {
    expect(markdown('# A\none\ntwo\n\n1. x\n   y\n2. z\n\n> q\n\n```py\na < b\n```\n---\n- i')).toEqual([
      { kind: 'heading', level: 1, parts: plain('A') },
      { kind: 'paragraph', parts: plain('one two') },
      { kind: 'list', ordered: true, start: 1, items: [plain('x y'), plain('z')] },
      { kind: 'quote', parts: plain('q') },
      { kind: 'code', text: 'a < b' },
      { kind: 'list', ordered: false, start: 1, items: [plain('i')] },
    ])
  })
  it('has emphasis, code and links inside of a line', () => {
    expect(inline('a **b _c_** `**d**` [e](#/fill) \\*f\\* snake_case_name 2 * 3 * 4')).toEqual([
      { kind: 'text', text: 'a ' },
      { kind: 'strong', parts: [plain('b ')[0], { kind: 'em', parts: plain('c') }] },
      { kind: 'text', text: ' ' },
      { kind: 'code', text: '**d**' },
      { kind: 'text', text: ' ' },
      { kind: 'link', href: '#/fill', parts: plain('e') },
      { kind: 'text', text: ' *f* snake_case_name 2 * 3 * 4' },
    ])
  })
  it('leaves HTML and dangerous links as text', () => {
    for (const text of ['<img src=x onerror=alert(1)>', '[a](javascript:alert)', '[a](data:text/html,x)', '**', '```'])
      expect(JSON.stringify(markdown(text))).not.toContain('"link"')
    expect(inline('<b>x</b>')).toEqual(plain('<b>x</b>'))
    expect(markdown('```\nnever closed')).toEqual([{ kind: 'code', text: 'never closed' }])
  })
})
