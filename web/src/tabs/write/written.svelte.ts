// Which parts of the shared text a model wrote. Another text, set by another tab, keeps the marks of what it has in
// common with the one before; a link brings its own.

import { edited, joined, type Mark } from './marks'

const MOST = 50 // marks in a link

class Written {
  #text = $state.raw('')
  #marks = $state.raw<Mark[]>([])

  marks(text: string): Mark[] {
    return text === this.#text ? this.#marks : edited(this.#marks, this.#text, text)
  }

  set(text: string, marks: Mark[]): void {
    this.#text = text
    this.#marks = marks
  }

  #linked = '[]' // what the address says

  /** The marks for a link: where each begins and ends. */
  link(text: string): number[] {
    const found = this.marks(text)
      .slice(0, MOST)
      .flatMap(({ start, end }) => [start, end])
    this.#linked = JSON.stringify(found)
    return found
  }

  /** The address says this, which may be of another text than the one before. */
  follow(text: string, link: number[]): void {
    if (JSON.stringify(link) === this.#linked) return
    const marks = link.flatMap((start, i) =>
      i % 2 === 0 && start >= 0
        ? [{ start: Math.trunc(start), end: Math.min(Math.trunc(link[i + 1] ?? 0), text.length) }]
        : [],
    )
    this.set(text, joined(marks))
  }
}

export const shared = new Written()
