import { type Token } from 'marked'
import { describe, expect, it } from 'vitest'
import type { Lesson, LessonPart, LessonSummary } from '../src/lib/api'
import { markdown, type Formula } from '../src/lib/markdown'
import { edit } from '../src/tabs/learn/editing'
import { byChapter, shownParts, viewNames } from '../src/tabs/learn/parts'
import { nearest, nSeen, reading } from '../src/tabs/learn/position'
import { ahead, linkOf, type Progress } from '../src/tabs/learn/progress.svelte'
import { pieces } from '../src/tabs/learn/python'

const part = (kind: LessonPart['kind'], text: string, tags: string[] = [], title = ''): LessonPart => ({
  kind,
  text,
  title,
  tags,
})
const summary = (name: string, chapter = 'A') => ({ name, chapter }) as LessonSummary
const known = (changes: Partial<Progress>): Progress => ({
  ...{ at: 0, seen: 0, parts: 0, solved: [], answers: {} },
  ...changes,
})

describe('the parts of a lesson', () => {
  it('have solutions with their exercises, and the title but once', () => {
    const parts = [
      part('text', '# A title\n\nText'),
      part('code', 'def f(): ...\n\ncheck(f)', ['exercise']),
      part('code', 'def f(): return 1\n\ncheck(f)', ['solution', 'hide-input']),
      part('code', '1 + 1'),
      part('view', 'Look.', [], '#/steps?model=tiny-books'),
    ]
    const shown = shownParts({ parts } as Lesson)
    expect(shown.map(({ kind, at }) => [kind, at])).toEqual([
      ['text', 0],
      ['exercise', 1],
      ['cell', 3],
      ['view', 4],
    ])
    expect(shown[0].part.text).toBe('Text')
    expect(shown[1]).toMatchObject({ name: 'f', solution: 'def f(): return 1\n\ncheck(f)' })
    expect(viewNames(parts[4].title)).toEqual({ tab: 'Step by step', model: 'tiny-books' })
  })
  it('are in chapters', () => {
    const all = byChapter([summary('a'), summary('b'), summary('c', 'B')])
    expect(all.map(({ chapter, lessons }) => [chapter, lessons.length])).toEqual([
      ['A', 2],
      ['B', 1],
    ])
  })
})

describe('progress', () => {
  it('goes on with what was begun, then with what is new', () => {
    const lessons = [summary('a'), summary('b'), summary('c')]
    expect(ahead(lessons, {})?.name).toBe('a')
    expect(ahead(lessons, { b: known({ seen: 2, parts: 5 }) })?.name).toBe('b')
    expect(ahead(lessons, { a: known({ seen: 5, parts: 5 }) })?.name).toBe('b')
    expect(linkOf('b', known({ at: 2, seen: 3, parts: 5 }))).toBe('#/learn?lesson=b&part=2')
    expect(linkOf('b', known({ at: 4, seen: 5, parts: 5 }))).toBe('#/learn?lesson=b')
  })
  it('follows what is in the window', () => {
    const boxes = [0, 2, 3].map((at, i) => ({ at, top: 500 * i - 400, bottom: 500 * i + 80 }))
    expect(reading(boxes, 800)).toBe(2)
    expect(nSeen(boxes, 800, 4)).toBe(3)
    expect(nSeen(boxes, 1100, 4)).toBe(4)
    expect(nearest(boxes, 800)).toBe(2)
    expect(nearest([], 800)).toBeNull()
  })
})

describe('Python', () => {
  it('is cut into comments, strings, keywords and numbers', () => {
    const source = 'for x in range(10):  # not "this"\n    print(f"{x}", \'a\\\'b\', in_x, 1e-6)\n"""open\n# text'
    const found = pieces(source)
    expect(found.map(({ text }) => text).join('')).toBe(source)
    expect(found.filter(({ kind }) => kind).map(({ kind, text }) => `${kind} ${text}`)).toEqual([
      'keyword for',
      'keyword in',
      'number 10',
      'comment # not "this"',
      'string f"{x}"',
      "string 'a\\'b'",
      'number 1e-6',
      'string """open\n# text',
    ])
  })
  it('is indented by keys', () => {
    const after = (key: string, shift: boolean, text: string, start: number, end = start): string | null => {
      const change = edit(key, shift, text, start, end)
      return change && text.slice(0, change.from) + change.text + text.slice(change.to)
    }
    expect(after('Tab', false, 'x', 0)).toBe('    x')
    expect(after('Tab', false, '  x', 2)).toBe('    x')
    expect(after('Tab', false, 'a\nb', 0, 3)).toBe('    a\n    b')
    expect(after('Tab', true, '    a\n  b', 4, 9)).toBe('a\nb')
    expect(after('Enter', false, 'def f():  # x', 13)).toBe('def f():  # x\n    ')
    expect(after('Enter', false, '    a', 5)).toBe('    a\n    ')
    expect(after('a', false, 'x', 0)).toBeNull()
  })
})

describe('the Markdown of lessons', () => {
  const formulas = (text: string): unknown[] => {
    const found: unknown[] = []
    const walk = (tokens: Token[]): void =>
      tokens.forEach((token) => {
        if (token.type === 'formula') found.push([(token as Formula).display, (token as Formula).tex])
        walk(('tokens' in token && token.tokens) || [])
      })
    walk(markdown(text, { formulas: true }))
    return found
  }
  it('has formulas where they are asked for, and dollars elsewhere', () => {
    expect(formulas('A $x_1 * y_2$ and `$a$` for $5.\n$$\\frac{a}\n{b}$$\nafter')).toEqual([
      [false, 'x_1 * y_2'],
      [true, '\\frac{a}\n{b}'],
    ])
    expect(formulas('from $5 to $6')).toEqual([])
    expect(JSON.stringify(markdown('$$x$$'))).not.toContain('formula')
  })
})
