import { describe, expect, it } from 'vitest'
import { done, isName, parse, Watch, type State, type Step } from '../src/lib/coach/script'
import { allowed, markdown, unescaped } from '../src/lib/markdown'

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
  it('is done by what is done during a step, and by nothing that is found so', () => {
    const during = (condition: string, ...states: State[]): boolean => {
      const watch = new Watch(parse(`# T\n\n---\nuntil: ${condition}\n\nx`).steps[0])
      return states.map((state) => watch.sees(state)).some(Boolean)
    }
    const at = (tab: string, model: string, more: State = {}): State => ({ tab, model, text: 'a', ...more })
    expect(during('beams = 1', at('tasks', 'm', { beams: '4' }), at('tasks', 'm', { beams: '1' }))).toBe(true)
    expect(during('beams = 1', at('tasks', 'm', { beams: '1' }))).toBe(false) // as somebody has left it
    expect(during('layer = 1', at('steps', 'm'), at('steps', 'm', { layer: '1' }))).toBe(false) // of the link
    expect(during('layer changes', at('steps', 'm', { layer: '0' }), at('attention', 'm', { layer: '3' }))).toBe(false)
    expect(during('text changes', at('write', 'm'), at('write', 'n', { text: 'b' }))).toBe(false) // its own example
    expect(during('text changes', at('write', 'm'), at('write', 'm', { text: 'b' }))).toBe(true)
    expect(during('tab = attention', at('tasks', 'm'), at('attention', 'm', { layer: '3' }))).toBe(true)
    expect(during('model changes', at('images', 'm'), at('images', 'n'))).toBe(true)
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
  it('leaves HTML as text, and follows links to web pages and, where they are our own, to this page', () => {
    const [block] = markdown('<img src=x onerror=alert(1)>')
    expect([block.type, block.raw]).toEqual(['html', '<img src=x onerror=alert(1)>']) // which is shown as it is
    const hrefs = ['javascript:alert(1)', 'data:text/html,x', 'mailto:a@b.c', '//x.org', 'https://x.org', '#/fill']
    expect(hrefs.filter((href) => allowed(href, false))).toEqual(['https://x.org'])
    expect(hrefs.filter((href) => allowed(href, true))).toEqual(['https://x.org', '#/fill'])
  })
  it('shows what it cannot read', () => {
    const deep = '> - '.repeat(50_000)
    expect(markdown(deep).length).toBe(1)
    expect(markdown('```\nnever closed').map((token) => token.type)).toEqual(['code'])
    expect(unescaped('a &lt; b &amp;amp; &#39;c&#39;')).toBe("a < b &amp; 'c'")
  })
})
