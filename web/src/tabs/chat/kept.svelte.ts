// The conversations that this browser keeps: each under a key of its own, so that two windows do not overwrite each
// other's. There is room for some; the oldest go first.

import { checked, fresh, path, type Talk } from './talk'

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
      if (key?.startsWith(KEY) && key !== KEY + this.current.id) this.#read()
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
    this.talks.sort((a, b) => b.changed - a.changed)
    try {
      this.#bound()
      for (;;) {
        try {
          localStorage.setItem(KEY + talk.id, JSON.stringify(talk))
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

  #read(): void {
    const found: Talk[] = []
    for (const key of Object.keys(localStorage).filter((name) => name.startsWith(KEY))) {
      try {
        const talk = checked(JSON.parse(localStorage.getItem(key) ?? ''))
        if (talk && key === KEY + talk.id) found.push(talk.id === this.current.id ? this.current : talk)
      } catch {
        // not ours
      }
    }
    this.talks = found.sort((a, b) => b.changed - a.changed)
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
