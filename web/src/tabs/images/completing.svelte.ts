// Ways to go on with an image, as they come in pixel by pixel.

import { aborted, api, ApiError } from '../../lib/api'
import { type Levels } from './levels'

/** A pixel's level; of one in colour, the mean of its channels, as the page draws in grey. */
const grey = (value: number | number[]) =>
  typeof value === 'number' ? value : value.reduce((sum, level) => sum + level, 0) / value.length

export interface Wish {
  model: string
  image: Levels
  n_given: number
  temperature: number
  seed: number
  n: number
}

export class Completing {
  /** The images so far; pixels that are still to come are NaN. */
  images = $state.raw<Levels[]>([])
  running = $state(false)
  /** How many pixels have come, of all images. */
  come = $state(0)
  error = $state.raw<ApiError | null>(null)
  /** What a classifier says of each, where there is one. */
  opinions = $state.raw<string[]>([])
  #control: AbortController | null = null

  #timer: ReturnType<typeof setTimeout> | undefined

  stop = (): void => {
    clearTimeout(this.#timer)
    this.#control?.abort()
    this.#control = null
    this.running = false
  }

  /** Begin anew, after so many milliseconds. `classifier` is asked for its opinion in the end. */
  start(wish: Wish, classifier: string | null, delay = 0): void {
    this.stop()
    this.running = true
    this.#timer = setTimeout(() => this.#run(wish, classifier), delay)
  }

  async #run(wish: Wish, classifier: string | null): Promise<void> {
    const control = (this.#control = new AbortController())
    const size = wish.image.length
    const images = Array.from({ length: wish.n }, () =>
      wish.image.map((row, r) => row.map((level, c) => (r * size + c < wish.n_given ? level : NaN))),
    )
    this.#show(images)
    Object.assign(this, { running: true, error: null, opinions: [], come: 0 })
    let come = 0
    let waiting = 0 // the next frame, in which what has come is drawn
    try {
      for await (const { index, pixel, value } of api.completeImage({ ...wish }, control.signal)) {
        if (control.signal.aborted) return
        images[index][Math.floor(pixel / size)][pixel % size] = grey(value)
        come++
        waiting ||= requestAnimationFrame(() => {
          waiting = 0
          if (control === this.#control) {
            this.#show(images)
            this.come = come
          }
        })
      }
      this.#show(images)
      this.come = come
      if (classifier) this.opinions = await opinions(classifier, images, control.signal)
    } catch (problem) {
      if (control.signal.aborted || aborted(problem)) return
      this.error = problem instanceof ApiError ? problem : new ApiError(String(problem), 0)
    } finally {
      if (control === this.#control) this.running = false
    }
  }

  #show(images: Levels[]): void {
    this.images = images.map((image) => image.map((row) => [...row]))
  }
}

async function opinions(model: string, images: Levels[], signal: AbortSignal): Promise<string[]> {
  const answers = await Promise.all(images.map((image) => api.classifyImage({ model, image }, signal)))
  return answers.map(
    ({ labels }) => labels.reduce((most, one) => (one.probability > most.probability ? one : most)).label,
  )
}
