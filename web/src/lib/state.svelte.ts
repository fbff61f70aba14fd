// What is on the screen, kept in the address: the tab, the model, the text, and the settings of each tab.
//
// Tabs share `page.model` and `page.text`; what is a tab's own comes from `settings('attention', {layer: 0})`, an
// object whose fields may be read and set like any $state. Only what differs from the defaults is written to the
// address.

import { untrack } from 'svelte'
import { api, ApiError, type Model, type Pullable } from './api'
import { examples } from './examples'
import { tabs, type Tab } from './tabs'
import { changed, makeHash, parseHash, read, type Values } from './url'

class Page {
  /** All served models; null until the server has told. */
  models = $state.raw<Model[] | null>(null)
  /** Models that the server could have, with the commands that fetch them. */
  pullable = $state.raw<Pullable[]>([])
  /** Why they are not known. */
  problem = $state.raw<string | null>(null)
  tabId = $state(tabs[0].id)
  /** The name of the chosen model, which may not fit each tab. */
  chosen = $state<string | null>(null)
  /** What was typed; null: nothing yet, so that the text is an example of the model's. */
  typed = $state<string | null>(null)

  get tab(): Tab {
    return tabs.find((tab) => tab.id === this.tabId) ?? tabs[0]
  }

  /** The models that this tab is for. */
  get fitting(): Model[] {
    return (this.models ?? []).filter(this.tab.fits)
  }

  /** The chosen model if the tab can use it, else the first one that it can; null if there is none (yet). */
  get model(): Model | null {
    return (
      this.fitting.find((model) => model.id === this.chosen) ??
      this.fitting.find(this.tab.first ?? (() => true)) ??
      this.fitting[0] ??
      null
    )
  }

  get text(): string {
    return this.typed ?? examples(this.model)[0]
  }

  set text(value: string) {
    this.typed = value
  }

  /** Ask the server which models there are. */
  async load(): Promise<void> {
    try {
      const found = await api.models()
      this.models = found.models
      this.pullable = found.pullable
      this.problem = null
    } catch (problem) {
      this.problem = problem instanceof ApiError ? problem.message : String(problem)
    }
  }
}

export const page = new Page()

interface Kept {
  values: Values
  usual: Values
}
const kept = new Map<string, Kept>() // by tab
const waiting = new Map<string, Record<string, string>>() // read from an address before the tab was loaded
let version = $state(0) // of `kept`, which is no state itself

/** The settings of a tab: an object with the fields of `usual`, of the same kinds, that the address remembers. */
export function settings<T extends { [K in keyof T]: Values[string] }>(tab: string, usual: T): T {
  const found = kept.get(tab)
  if (found) return found.values as T
  const values: Values = $state({ ...(structuredClone(usual) as Values) })
  apply({ values, usual: usual as Values }, waiting.get(tab) ?? {})
  kept.set(tab, { values, usual: usual as Values })
  version++
  return values as T
}

function apply({ values, usual }: Kept, params: Record<string, string>): void {
  for (const name of Object.keys(usual)) values[name] = read(params[name], usual[name])
}

/** The address of what is on the screen. */
export function address(): string {
  const params: Record<string, string> = {}
  const model = page.model?.id ?? page.chosen
  if (model !== null && page.tabId !== 'runs') params.model = model
  if (page.typed !== null && !['images', 'runs'].includes(page.tabId)) params.text = page.typed
  void version
  const own = kept.get(page.tabId)
  return makeHash({
    tab: page.tabId,
    params: { ...params, ...(own ? changed(own.values, own.usual) : waiting.get(page.tabId)) },
  })
}

function goTo(hash: string): void {
  const { tab, params } = parseHash(hash)
  const { model, text, ...own } = params
  page.tabId = tabs.some((known) => known.id === tab) ? tab : tabs[0].id
  if (model !== undefined) page.chosen = model
  if (text !== undefined) page.typed = text
  const there = kept.get(page.tabId)
  if (there) apply(there, own)
  else waiting.set(page.tabId, own)
}

// Milliseconds of quiet before the address is written: Safari allows a hundred changes in thirty seconds.
const PAUSE = 300

/** Read the address, and from now on keep it and the state the same. */
export function begin(): void {
  goTo(location.hash)
  let shown = page.tabId
  let next: string | null = null // the address that is about to be written
  let timer: ReturnType<typeof setTimeout> | undefined

  function write(): void {
    clearTimeout(timer)
    if (next !== null && next !== location.hash) history.replaceState(null, '', next)
    next = null
  }
  // Another tab is a step that "back" undoes, and is written at once; a changed setting is neither.
  $effect.root(() => {
    $effect(() => {
      const now = address()
      untrack(() => {
        if (page.tabId === shown) {
          next = now
          clearTimeout(timer)
          timer = setTimeout(write, PAUSE)
        } else {
          write() // of the tab that is left
          if (now !== location.hash) history.pushState(null, '', now)
        }
        shown = page.tabId
      })
    })
  })
  // Whoever goes to the address to copy it leaves the page's window first.
  for (const leaving of ['pagehide', 'blur']) addEventListener(leaving, write)
  addEventListener('popstate', () => {
    clearTimeout(timer)
    next = null
    goTo(location.hash)
    shown = page.tabId
  })
}
