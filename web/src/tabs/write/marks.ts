// Which stretches of a text the model wrote, kept right while the text is edited.

export interface Mark {
  start: number
  end: number
}

/** Where two texts differ: they are the same before `from`, and after `oldEnd` in the one and `newEnd` in the other. */
function difference(before: string, after: string): { from: number; oldEnd: number; newEnd: number } {
  const shorter = Math.min(before.length, after.length)
  let from = 0
  while (from < shorter && before[from] === after[from]) from++
  let same = 0
  while (same < shorter - from && before[before.length - 1 - same] === after[after.length - 1 - same]) same++
  return { from, oldEnd: before.length - same, newEnd: after.length - same }
}

/** The marks of a text after an edit; what was typed is nobody's but the writer's. */
export function edited(marks: Mark[], before: string, after: string): Mark[] {
  if (before === after) return marks
  const { from, oldEnd, newEnd } = difference(before, after)
  const moved = newEnd - oldEnd
  const found: Mark[] = []
  for (const { start, end } of marks) {
    if (start < from) found.push({ start, end: Math.min(end, from) })
    if (end > oldEnd) found.push({ start: Math.max(start, oldEnd) + moved, end: end + moved })
  }
  return joined(found)
}

/** In order, and as few as possible. */
export function joined(marks: Mark[]): Mark[] {
  const found: Mark[] = []
  for (const mark of marks.filter(({ start, end }) => end > start).sort((a, b) => a.start - b.start)) {
    const last = found.at(-1)
    if (last && mark.start <= last.end) last.end = Math.max(last.end, mark.end)
    else found.push({ ...mark })
  }
  return found
}

/** A text cut at the marks. */
export function segments(text: string, marks: Mark[]): { text: string; marked: boolean }[] {
  const found: { text: string; marked: boolean }[] = []
  let at = 0
  for (const { start, end } of marks) {
    if (start >= text.length) break
    if (start > at) found.push({ text: text.slice(at, start), marked: false })
    found.push({ text: text.slice(start, end), marked: true })
    at = Math.min(end, text.length)
  }
  if (at < text.length) found.push({ text: text.slice(at), marked: false })
  return found
}
