// What the cells of a lesson show, as the server runs them.

import { aborted, api, ApiError } from '../../lib/api'

export interface Output {
  text: string
  figures: string[]
  error: string
}

export class LessonRun {
  /** By the cell's index among the lesson's parts. */
  outputs = $state.raw<Record<number, Output>>({})
  running = $state(false)
  /** Why it stopped; empty if it did not. */
  error = $state('')
  readonly n = $derived(Object.keys(this.outputs).length)

  /** Run them, or have what they showed before, until the signal says that nobody reads it. */
  async start(lesson: string, signal: AbortSignal): Promise<void> {
    Object.assign(this, { outputs: {}, running: true, error: '' })
    try {
      for await (const event of api.runLesson(lesson, signal)) {
        if ('done' in event) this.error = event.error
        else this.outputs = { ...this.outputs, [event.cell]: event }
      }
    } catch (problem) {
      if (signal.aborted || aborted(problem)) return
      this.error = problem instanceof ApiError ? problem.message : String(problem)
    }
    this.running = false
  }
}
