// A run that is followed: its log is read from where the last answer ended, every second while it is running.

import { aborted, api, ApiError, type RunLog } from '../../lib/api'
import { empty, extended, type Log } from './log'

const SOON = 1000
const LATER = 4000 // milliseconds

export class Follow {
  log = $state.raw<Log>(empty())
  samples = $state.raw<{ step: number; text: string }[]>([])
  /** How it stands; null until the server has told. */
  run = $state.raw<Omit<RunLog, 'lines' | 'samples'> | null>(null)
  error = $state.raw<ApiError | null>(null)
  #place = 0

  constructor(readonly name: string) {}

  /** Read on until the signal. */
  async go(signal: AbortSignal): Promise<void> {
    while (!signal.aborted) {
      if (!document.hidden || !this.run) await this.#read(signal)
      await pause(this.run?.more && !this.error ? 0 : this.run?.state === 'running' ? SOON : LATER, signal)
    }
  }

  async #read(signal: AbortSignal): Promise<void> {
    try {
      const { lines, samples, ...run } = await api.run(this.name, this.#place, this.samples.at(-1)?.step ?? -1, signal)
      if (run.restarted) {
        // It was taken up again at an earlier step: what was read of later ones has never been.
        this.log = extended(empty(), lines)
        const last = this.log.steps.at(-1) ?? 0
        this.samples = this.samples.filter((sample) => sample.step <= last)
      } else {
        this.log = extended(this.log, lines)
        if (samples.length) this.samples = [...this.samples, ...samples]
      }
      this.#place = run.next
      this.run = run
      this.error = null
    } catch (problem) {
      if (signal.aborted || aborted(problem)) return
      this.error = problem instanceof ApiError ? problem : new ApiError(String(problem), 0)
    }
  }
}

export function pause(milliseconds: number, signal: AbortSignal): Promise<void> {
  return new Promise((done) => {
    const timer = setTimeout(done, milliseconds)
    signal.addEventListener('abort', () => (clearTimeout(timer), done()), { once: true })
  })
}
