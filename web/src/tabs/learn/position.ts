// Where in a lesson the reader is, by what is seen of its parts.

export interface Box {
  /** The part's index in the lesson. */
  at: number
  /** Its edges, in pixels from the top of the window. */
  top: number
  bottom: number
}

/** The part that is being read: the last one that begins in the upper part of the window. */
export const reading = (parts: Box[], height: number): number =>
  (parts.findLast(({ top }) => top < 0.4 * height) ?? parts[0])?.at ?? 0

/** How many parts have been seen, of a lesson of n: up to the last one that is in the window. */
export function nSeen(parts: Box[], height: number, n: number): number {
  const last = parts.findLast(({ top }) => top < height)
  if (!last) return 0
  return last === parts.at(-1) && last.bottom < height + 1 ? n : last.at + (last === parts.at(-1) ? 0 : 1)
}

/** The part that is nearest to the middle of the window; null if there are none. */
export function nearest(parts: Box[], height: number): number | null {
  const far = ({ top, bottom }: Box): number => Math.max(top - height / 2, height / 2 - bottom, 0)
  return parts.reduce<Box | null>((best, part) => (best && far(best) <= far(part) ? best : part), null)?.at ?? null
}
