// What is on the screen, kept in the address: the tab, the model, the text, the settings of each tab, and the coach
// (lib/coach) with its step. What an address leaves out, because its tab has no use for it, survives a reload while the
// browser's tab is open.
//
// Tabs share `page.model` and `page.text`; what is a tab's own comes from `settings('attention', {layer: 0})`, an
// object whose fields may be read and set like any $state. Only what differs from the defaults is written to the
// address.

import { untrack } from 'svelte'
import { api, ApiError, type Model, type Pullable } from './api'
import { examples } from './examples'
import { tabs, type Tab } from './tabs'
import { changed, makeHash, parseHash, read, write as written, type Values } from './url'

/** Whether this page is a live view within another: it has no tabs, and remembers nothing. */
export const embedded = globalThis.location?.search === '?embedded'

const CHOICES = 8 // models that are remembered as chosen

class Page {
  /** All served models; null until the server has told. */
  models = $state.raw<Model[] | null>(null)
  /** Models that the server could have, with the commands that fetch them. */
  pullable = $state.raw<Pullable[]>([])
  /** Why they are not known. */
  problem = $state.raw<string | null>(null)
  tabId = $state(tabs[0].id)
  /** The names of models that were chosen, the last one first; none of them may fit a tab. */
  choices = $state.raw<string[]>([])
  /** The name of the model that a link asked for, until another is chosen. */
  linked = $state<string | null>(null)
  /** What was typed; null: nothing yet, so that the text is an example of the model's. */
  typed = $state<string | null>(null)
  /** The coach: the name of a script that ships, or the text of one; empty: there is none. */
  coach = $state('')
  coachStep = $state(0)
  /** How the text began that came out of a chat template; empty: it did not. */
  template = $state('')

  get tab(): Tab {
    return tabs.find((tab) => tab.id === this.tabId) ?? tabs[0]
  }

  /** The models that this tab is for. */
  get fitting(): Model[] {
    return (this.models ?? []).filter(this.tab.fits)
  }

  get chosen(): string | null {
    return this.choices[0] ?? null
  }

  set chosen(name: string | null) {
    this.linked = null
    if (name !== null) this.prefer(name)
  }

  /** Choose a model for whoever looks at the page; what the link asked for is not forgotten. */
  prefer(name: string): void {
    this.choices = [name, ...this.choices.filter((other) => other !== name)].slice(0, CHOICES)
  }

  /** Go to another tab, as by its button: what the link asked for does not matter there. */
  visit(tab: string): void {
    this.tabId = tab
    this.linked = null
  }

  /** The last chosen model that the tab can use, else the first one that it can; null if there is none (yet). */
  get model(): Model | null {
    const chosen = this.choices.find((name) => this.fitting.some((model) => model.id === name))
    return (
      this.fitting.find((model) => model.id === chosen) ??
      this.fitting.find(this.tab.first ?? (() => true)) ??
      this.fitting[0] ??
      null
    )
  }

  /** The name of a model that a link asked for and that is not shown. */
  get missing(): string | null {
    return this.model && this.linked !== null && this.linked !== this.model.id ? this.linked : null
  }

  get text(): string {
    return this.typed ?? examples(this.model)[0]
  }

  set text(value: string) {
    this.typed = value
  }

  /** Whether special tokens written in the text are those tokens, as in a prompt that a chat template made. */
  get rendered(): boolean {
    return this.template !== '' && (this.model?.chat ?? false) && this.text.startsWith(this.template)
  }

  /** The text is a prompt as a chat template writes it, or was one. */
  set rendered(value: boolean) {
    this.template = value ? this.text.slice(0, 12) : ''
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
  const model = page.missing ?? page.model?.id ?? page.chosen
  if (model !== null && !page.tab.alone) params.model = model
  if (page.typed !== null && !['images', 'chat'].includes(page.tabId) && !page.tab.alone) params.text = page.typed
  if (params.text !== undefined && page.rendered) params.rendered = 'true'
  void version
  const own = kept.get(page.tabId)
  const coach = page.coach && { coach: page.coach, coach_step: String(page.coachStep + 1) }
  return makeHash({
    tab: page.tabId,
    params: { ...params, ...(own ? changed(own.values, own.usual) : waiting.get(page.tabId)), ...(coach || {}) },
  })
}

/** All that an address may say of the open tab, with the defaults: what a coach looks at. */
export function shownState(): Record<string, string> {
  void version
  const own = Object.entries(kept.get(page.tabId)?.values ?? {}).map(([name, value]) => [name, written(value)])
  return {
    ...Object.fromEntries(own),
    tab: page.tabId,
    model: page.model?.id ?? '',
    kind: page.model?.kind ?? '',
    text: page.text,
  }
}

/** Go to an address that a link or a step of the coach names: the coach stays, unless it names one. */
export function openLink(hash: string): void {
  const { tab, params } = parseHash(hash)
  const { coach = page.coach, coach_step = params.coach ? '1' : String(page.coachStep + 1) } = params
  goTo(makeHash({ tab, params: { ...params, coach, coach_step } }))
}

function goTo(hash: string): void {
  const { tab, params } = parseHash(hash)
  const { model, text, rendered, coach, coach_step, ...own } = params
  page.tabId = tabs.some((known) => known.id === tab) ? tab : tabs[0].id
  if (model !== undefined) {
    page.chosen = model
    page.linked = model
  }
  if (text !== undefined) {
    page.typed = text
    page.rendered = rendered === 'true'
  }
  page.coach = coach ?? ''
  page.coachStep = Math.max(read(coach_step, 1) - 1, 0)
  const there = kept.get(page.tabId)
  if (there) apply(there, own)
  else waiting.set(page.tabId, own)
}

// Milliseconds of quiet before the address is written: Safari allows a hundred changes in thirty seconds.
const PAUSE = 300

const MEMORY = 'heedful-page'
function remember(): void {
  if (!embedded) sessionStorage.setItem(MEMORY, JSON.stringify([page.typed, page.choices]))
}
function recall(): void {
  if (embedded) return
  try {
    const [typed, choices] = JSON.parse(sessionStorage.getItem(MEMORY) ?? '[null, []]')
    if (typeof typed === 'string') page.typed = typed
    if (Array.isArray(choices)) page.choices = choices.filter((name) => typeof name === 'string')
  } catch {
    // written by another version of the page
  }
}

/** Read the address, and from now on keep it and the state the same. */
export function begin(): void {
  recall()
  goTo(location.hash)
  let shown = page.tabId
  let next: string | null = null // the address that is about to be written
  let timer: ReturnType<typeof setTimeout> | undefined

  function write(): void {
    clearTimeout(timer)
    if (next !== null && next !== location.hash) history.replaceState(null, '', next)
    next = null
    remember()
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
  // A link to a place of this page goes there without a reload, and "back" undoes it. The coach stays, unless it brings
  // its own.
  addEventListener('click', (event) => {
    const link = event.target instanceof Element ? event.target.closest('a[href^="#/"]') : null
    if (!link || event.defaultPrevented || event.button || event.ctrlKey || event.metaKey || event.shiftKey) return
    event.preventDefault()
    write()
    openLink(link.getAttribute('href')!)
    if (address() !== location.hash) history.pushState(null, '', address())
    document.getElementById('main')?.focus()
    scrollTo(0, 0)
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
