// Plays a pass: the moment of it that is shown, from the press of a button to the token that drops into the text.

import { moment, STILL, type Moment, type Tile } from './map'

export class Player {
  now = $state.raw<Moment>(STILL)
  playing = $state(false)
  /** Whether things may move. */
  readonly moves = !matchMedia('(prefers-reduced-motion: reduce)').matches
  #frame = 0

  /** From the first step to the last, and then `done`. */
  start(tiles: Tile[], done: () => void): void {
    this.stop()
    this.playing = true
    let begun: number | null = null
    const next = (time: number) => {
      begun ??= time
      this.now = moment(tiles, (time - begun) / 1000)
      if (!this.now.over) {
        this.#frame = requestAnimationFrame(next)
        return
      }
      this.stop()
      done()
    }
    this.#frame = requestAnimationFrame(next)
  }

  stop = (): void => {
    cancelAnimationFrame(this.#frame)
    this.playing = false
    this.now = STILL
  }
}
