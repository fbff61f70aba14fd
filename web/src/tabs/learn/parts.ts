// A lesson's parts as the page shows them: exercises with their solutions, views with the tab they open.

import type { Lesson, LessonPart, LessonSummary } from '../../lib/api'
import { tabs } from '../../lib/tabs'
import { parseHash } from '../../lib/url'

export type Shown =
  | { kind: 'text' | 'question' | 'view' | 'cell'; at: number; part: LessonPart }
  | { kind: 'exercise'; at: number; part: LessonPart; name: string; solution: string }

/** What is shown, in order. A solution is shown with its exercise; the first heading is the page's own. */
export function shownParts({ parts }: Lesson): Shown[] {
  const solutions = new Map(
    parts.filter(({ tags }) => tags.includes('solution')).map(({ text }) => [exerciseName(text), text]),
  )
  return parts.flatMap((part, at): Shown[] => {
    if (part.tags.includes('solution')) return []
    if (part.tags.includes('exercise')) {
      const name = exerciseName(part.text)
      return [{ kind: 'exercise', at, part, name, solution: solutions.get(name) ?? '' }]
    }
    if (part.kind === 'code') return [{ kind: 'cell', at, part }]
    const text = at === 0 ? part.text.replace(/^#\s.*\n?/, '').trim() : part.text
    return [{ kind: part.kind, at, part: { ...part, text } }]
  })
}

/** The function that an exercise asks for: what its last line checks. */
export const exerciseName = (source: string): string => /^check\((\w+)\)\s*$/m.exec(source)?.[1] ?? ''

/** What an address of the page opens, in words: the tab, and the model. */
export function viewNames(address: string): { tab: string; model: string } {
  const { tab, params } = parseHash(address)
  return { tab: tabs.find(({ id }) => id === tab)?.label ?? tab, model: params.model ?? '' }
}

/** The lessons by chapter, in the order of the course. */
export function byChapter(lessons: LessonSummary[]): { chapter: string; lessons: LessonSummary[] }[] {
  const found: { chapter: string; lessons: LessonSummary[] }[] = []
  for (const lesson of lessons) {
    if (found.at(-1)?.chapter === lesson.chapter) found.at(-1)!.lessons.push(lesson)
    else found.push({ chapter: lesson.chapter, lessons: [lesson] })
  }
  return found
}
