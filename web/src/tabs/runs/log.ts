// What a run's log says, as curves.

export interface Log {
  steps: number[]
  losses: number[] // NaN where a loss was not a number
  rates: number[] // the learning rate
  tokens: number[] // so far
  seconds: number[] // so far
  speeds: number[] // tokens per second
  validation: { step: number; loss: number; perplexity: number | null; bits: number | null }[]
  notes: { step: number; text: string }[]
}

export const empty = (): Log => ({
  steps: [],
  losses: [],
  rates: [],
  tokens: [],
  seconds: [],
  speeds: [],
  validation: [],
  notes: [],
})

const real = (value: unknown): number => (typeof value === 'number' ? value : NaN)
const perhaps = (value: unknown): number | null => (typeof value === 'number' ? value : null)

/** The log with these lines after it. */
export function extended(log: Log, lines: Record<string, unknown>[]): Log {
  if (!lines.length) return log
  const next: Log = Object.fromEntries(Object.entries(log).map(([name, list]) => [name, [...list]])) as unknown as Log
  for (const line of lines) {
    const step = real(line.step)
    if (!Number.isFinite(step)) continue
    if (line.kind === 'step') {
      const [tokens, seconds] = [real(line.tokens) || 0, real(line.seconds) || 0]
      next.steps.push(step)
      next.losses.push(real(line.loss))
      next.rates.push(real(line.lr))
      next.tokens.push((next.tokens.at(-1) ?? 0) + tokens)
      next.seconds.push((next.seconds.at(-1) ?? 0) + seconds)
      next.speeds.push(seconds > 0 ? tokens / seconds : NaN)
    } else if (line.kind === 'validation') {
      next.validation.push({
        step,
        loss: real(line.loss),
        perplexity: perhaps(line.perplexity),
        bits: perhaps(line.bits_per_byte),
      })
    } else if (line.kind === 'note') next.notes.push({ step, text: String(line.text ?? '') })
  }
  return next
}

export type Along = 'step' | 'tokens' | 'time'
export type Point = [x: number, y: number]

/** The x of every logged step. */
export const along = (log: Log, by: Along): number[] =>
  by === 'step' ? log.steps : by === 'tokens' ? log.tokens : log.seconds

/** Where a step lies on that axis: at the last logged one that is not after it. */
export function placeOf(log: Log, by: Along, step: number): number {
  if (by === 'step') return step
  let [low, high] = [0, log.steps.length]
  while (low < high) {
    const middle = (low + high) >> 1
    if (log.steps[middle] <= step) low = middle + 1
    else high = middle
  }
  return low ? along(log, by)[low - 1] : 0
}

/** A running mean that forgets: 0 leaves all as it is. What is not a number is left out. */
export function smoothed(values: number[], forget: number): number[] {
  let [mean, weight] = [0, 0]
  return values.map((value) => {
    if (!Number.isFinite(value)) return NaN
    mean = forget * mean + (1 - forget) * value
    weight = forget * weight + (1 - forget)
    return mean / weight
  })
}

/** At most so many points, each the mean of its neighbours. */
export function thinned(x: number[], y: number[], most = 500): Point[] {
  const points: Point[] = []
  const every = Math.max(1, Math.ceil(x.length / most))
  for (let i = 0; i < x.length; i += every) {
    let [sum, n] = [0, 0]
    const end = Math.min(i + every, x.length)
    for (let j = i; j < end; j++) {
      if (!Number.isFinite(y[j])) continue
      sum += y[j]
      n++
    }
    if (n) points.push([x[end - 1], sum / n])
  }
  return points
}

/** Of points in the order of x, the one nearest to a place. */
export function nearest(points: Point[], x: number): Point | null {
  let best: Point | null = null
  for (const point of points) if (!best || Math.abs(point[0] - x) < Math.abs(best[0] - x)) best = point
  return best
}

/** 75 s -> 1 min 15 s */
export function duration(seconds: number): string {
  const whole = Math.round(seconds)
  if (whole < 60) return `${whole} s`
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`
}
