// The conversations that this browser keeps, each under a key of its own. Two windows may continue the same one: it
// is merged with what the other has kept since, and kept again where the other has overwritten it. There is room for
// some conversations; the oldest go first.

import { checked, fresh, merge, path, settled, type Talk } from './talk'

const KEY = 'heedful-chat-'
const MOST = 100
const MOST_CHARACTERS = 2_000_000 // browsers keep about five million

class Kept {
  talks = $state<Talk[]>([]) // the last changed first
  /** The one on the screen, which is kept once something was said in it. */
  current = $state<Talk>(fresh())
  /** Why they are not kept, or how many are no longer. */
  note = $state('')

  constructor() {
    try {
      this.#read()
    } catch {
      return // a browser that keeps nothing for this page
    }
    if (this.talks.length) this.current = this.talks[0]
    addEventListener('storage', ({ key }) => {
      if (key?.startsWith(KEY)) this.#read(key)
    })
  }

  has(id: string): boolean {
    return this.talks.some((talk) => talk.id === id)
  }

  open(id: string): void {
    this.current = this.talks.find((talk) => talk.id === id) ?? this.current
  }

  begin(talk: Talk = fresh(this.current)): void {
    this.current = talk
    if (talk.turns.length) this.keep(this.current)
  }

  /** Write a conversation down, and make room for it. */
  keep(talk: Talk): void {
    if (!this.has(talk.id)) this.talks.unshift(talk)
    try {
      const stored = this.#stored(KEY + talk.id)
      if (stored) merge(talk, stored)
      this.talks.sort((a, b) => b.changed - a.changed)
      this.#bound()
      for (;;) {
        try {
          localStorage.setItem(KEY + talk.id, JSON.stringify(settled(talk)))
          return
        } catch (problem) {
          if (this.talks.length < 2) throw problem
          this.#drop()
        }
      }
    } catch {
      this.note = 'This browser keeps nothing for this page: export what you want to have again.'
    }
  }

  forget(id: string): void {
    try {
      localStorage.removeItem(KEY + id)
    } catch {
      // it was not kept
    }
    this.talks = this.talks.filter((talk) => talk.id !== id)
    if (this.current.id === id) this.current = this.talks[0] ?? fresh()
  }

  add(talks: Talk[]): void {
    for (const talk of talks) {
      if (this.has(talk.id)) talk.id = fresh().id
      if (!path(talk).length && talk.turns.length) talk.leaf = talk.turns.length - 1
      this.keep(talk)
    }
    this.open(talks[0]?.id ?? '')
  }

  /** Read all that is kept; `changed` is the key of what another window has written. */
  #read(changed = ''): void {
    const found: Talk[] = []
    for (const key of Object.keys(localStorage).filter((name) => name.startsWith(KEY))) {
      const stored = this.#stored(key)
      if (!stored) continue
      const mine = [this.current, ...this.talks].find(({ id }) => id === stored.id)
      const more = mine !== undefined && merge(mine, stored) && key === changed
      if (more) localStorage.setItem(key, JSON.stringify(settled(mine))) // the other has overwritten it
      found.push(mine ?? stored)
    }
    this.talks = found.sort((a, b) => b.changed - a.changed)
  }

  #stored(key: string): Talk | null {
    try {
      const talk = checked(JSON.parse(localStorage.getItem(key) ?? ''))
      return talk && key === KEY + talk.id ? talk : null
    } catch {
      return null // not ours
    }
  }

  #drop(): void {
    const oldest = this.talks.findLast((talk) => talk.id !== this.current.id)
    if (!oldest) return
    localStorage.removeItem(KEY + oldest.id)
    this.talks = this.talks.filter((talk) => talk !== oldest)
    this.note = 'There was no room for the oldest conversation, which is gone: export what you want to have again.'
  }

  #bound(): void {
    const size = () => this.talks.reduce((sum, talk) => sum + JSON.stringify(talk).length, 0)
    while (this.talks.length > 1 && (this.talks.length > MOST || size() > MOST_CHARACTERS)) this.#drop()
  }
}

export const kept = new Kept()
