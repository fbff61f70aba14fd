// A script that is followed: where it is, which steps are done, going on when one is. The name or text of the script
// and the step are the page's (page.coach), so that a link has them. To be made while a component is made.

import { untrack } from 'svelte'
import { openLink, page, shownState } from '../state.svelte'
import { isName, parse, Watch, type Script } from './script'
import { shipped } from './shipped'

const PAUSE = 1000 // milliseconds for which a step that is done is seen to be

export class Coach {
  /** The Markdown of the script; null until it is there. */
  source = $state.raw<string | null>(null)
  /** Whether an address names a script that does not exist. */
  unknown = $state(false)
  /** The numbers of steps that are done. */
  ticked = $state.raw<number[]>([])
  readonly script: Script | null = $derived(this.source === null ? null : parse(this.source))
  readonly last = $derived(Math.max((this.script?.steps.length ?? 1) - 1, 0))
  readonly at = $derived(Math.min(page.coachStep, this.last))
  readonly step = $derived(this.script?.steps[this.at] ?? null)
  #timer: ReturnType<typeof setTimeout> | undefined

  constructor() {
    $effect(() => {
      const coach = page.coach
      untrack(() => void this.#load(coach))
    })
    $effect(() => {
      const [step, at] = [this.step, this.at]
      const watch = step && new Watch(step)
      $effect(() => {
        const now = shownState()
        untrack(() => {
          if (watch?.sees(now) && !this.ticked.includes(at)) this.#tick(at)
        })
      })
    })
    $effect(() => () => clearTimeout(this.#timer))
  }

  async #load(coach: string): Promise<void> {
    const source = isName(coach) ? await shipped(coach).catch(() => null) : coach
    if (page.coach !== coach) return
    this.unknown = source === null
    this.ticked = []
    this.source = source
    // A link may be nothing but the script, which then says where it begins.
    if (page.tabId === 'start' && this.step?.open) openLink(this.step.open)
  }

  #tick(at: number): void {
    this.ticked = [...this.ticked, at]
    if (at < this.last) this.#timer = setTimeout(() => this.go(at + 1), PAUSE)
  }

  /** Go to a step; at its beginning the page shows what the step is about. */
  go = (step: number): void => {
    clearTimeout(this.#timer)
    const to = Math.min(Math.max(step, 0), this.last)
    if (to === this.at) return
    page.coachStep = to
    const target = this.script?.steps[to].open
    if (target) openLink(target)
  }

  close = (): void => {
    clearTimeout(this.#timer)
    page.coach = ''
    page.coachStep = 0
  }
}
