// How far the reader is in each lesson, and the answers to exercises, kept in this browser.

import type { LessonSummary } from '../../lib/api'

export interface Progress {
  /** The part that was last read, and how many have been seen of how many. */
  at: number
  seen: number
  parts: number
  solved: string[]
  /** What was written, by exercise. */
  answers: Record<string, string>
}
type All = Record<string, Progress>

const NAME = 'heedful-learn'
const NOTHING: Progress = { at: 0, seen: 0, parts: 0, solved: [], answers: {} }

function stored(): All {
  try {
    const found: unknown = JSON.parse(localStorage.getItem(NAME) ?? '{}')
    const all = typeof found === 'object' && found !== null ? (found as Record<string, Partial<Progress>>) : {}
    return Object.fromEntries(Object.entries(all).map(([name, one]) => [name, { ...NOTHING, ...one }]))
  } catch {
    return {} // written by another version of the page
  }
}

class Kept {
  all = $state.raw<All>(stored())

  of(lesson: string): Progress {
    return this.all[lesson] ?? NOTHING
  }

  /** Change what is known of a lesson; another window may have changed the others. */
  set(lesson: string, change: (before: Progress) => Partial<Progress>): void {
    const all = stored()
    const before = all[lesson] ?? NOTHING
    this.all = { ...all, [lesson]: { ...before, ...change(before) } }
    try {
      localStorage.setItem(NAME, JSON.stringify(this.all))
    } catch {
      // no room: it is remembered until the page is closed
    }
  }
}

export const progress = new Kept()

export const isFinished = ({ seen, parts }: Progress): boolean => parts > 0 && seen >= parts
/** How much of a lesson was read, from 0 to 1. */
export const share = ({ seen, parts }: Progress): number => (parts ? Math.min(seen / parts, 1) : 0)

/** The lesson to go on with: the first that was begun and not finished, else the first that was not begun. */
export function ahead(lessons: LessonSummary[], all: All): LessonSummary | undefined {
  const begun = lessons.find(({ name }) => all[name]?.seen && !isFinished(all[name]))
  return begun ?? lessons.find(({ name }) => !all[name]?.seen)
}

/** Where a lesson is gone on with. */
export function linkOf(lesson: string, { at, ...rest }: Progress = NOTHING): string {
  return `#/learn?lesson=${lesson}${at && !isFinished({ at, ...rest }) ? `&part=${at}` : ''}`
}
