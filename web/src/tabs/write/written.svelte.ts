// Which parts of the shared text a model wrote. It belongs to one text: to another, set by a link or another tab, the
// marks do not apply.

import { edited, type Mark } from './marks'

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
}

export const shared = new Written()
