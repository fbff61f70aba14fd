// The colours of points: blue for the first sentence, orange for the second, grey between. Unlike the colours of cells,
// the middle must be seen on the paper.

export const STEPS = 31

type Colour = [number, number, number]
const ENDS: Record<'light' | 'dark', { first: Colour; middle: Colour; second: Colour }> = {
  light: { first: [22, 84, 160], middle: [186, 178, 170], second: [190, 68, 12] },
  dark: { first: [120, 186, 255], middle: [96, 88, 82], second: [255, 150, 84] },
}

/** The step of a difference, of which `reach` is the largest with a colour of its own. */
export function stepOf(difference: number, reach: number): number {
  const t = Math.min(Math.max(difference / reach, -1), 1)
  return Math.round(((t + 1) / 2) * (STEPS - 1))
}

export function stepColour(step: number, dark: boolean): string {
  const { first, middle, second } = ENDS[dark ? 'dark' : 'light']
  const t = (2 * step) / (STEPS - 1) - 1
  const end = t < 0 ? first : second
  const much = Math.abs(t) ** 0.8
  return `rgb(${middle.map((from, c) => Math.round(from + (end[c] - from) * much)).join(' ')})`
}

/** Indices of the points of each step, so that each colour is set once. */
export function binned(difference: Float32Array, reach: number): number[][] {
  const found: number[][] = Array.from({ length: STEPS }, () => [])
  for (let i = 0; i < difference.length; i++) found[stepOf(difference[i], reach)].push(i)
  return found
}

/** Steps from the middle outwards, so that what differs most is drawn last and seen. */
export const ORDER: number[] = Array.from({ length: STEPS }, (_, i) => i).sort(
  (a, b) => Math.abs(a - (STEPS - 1) / 2) - Math.abs(b - (STEPS - 1) / 2),
)
