// Templates, as the server reads them (observe/template.py): [a|b] stands for a or b, a `_` of its own is the blank,
// and a backslash makes the next character ordinary. The server expands them, and knows which brackets name models;
// here is how what is on the screen is written as one template.

const MARKS = '_[]|\\'

/** A text that means itself in a template. */
export function plain(text: string): string {
  return [...text].map((c) => (MARKS.includes(c) ? '\\' + c : c)).join('')
}

/** Whether this `_`, of `count` together, is a blank: it touches no letter or digit. */
const isBlank = (text: string, at: number, count: number) =>
  !/[\p{L}\p{N}]/u.test((text[at - 1] ?? '') + (text[at + count] ?? ''))

/** What stands before and after the only blank of a text without brackets; null where it has another number of them. */
export function aroundBlank(text: string): [string, string] | null {
  const found = [...text.matchAll(/\\.|_+/gs)].filter(
    (match) => match[0][0] === '_' && isBlank(text, match.index, match[0].length),
  )
  if (found.length !== 1) return null
  return [text.slice(0, found[0].index), text.slice(found[0].index + found[0][0].length)]
}

/** Two sentences as one template: "He ran _." and "She ran _." are "[He|She] ran _."; null where it is impossible. */
export function merged(a: string, b: string): string | null {
  const [first, second] = [aroundBlank(a), aroundBlank(b)]
  if (!first || !second || a === b || /[[\]|\\]/.test(a + b)) return null
  const before = first[0] === second[0] ? first[0] : bracketed(first[0], second[0])
  const after = first[1] === second[1] ? first[1] : bracketed(first[1], second[1])
  return first[0] !== second[0] && first[1] !== second[1] ? null : `${before}_${after}`
}

/** Two texts as one with a bracket around the words in which they differ. */
function bracketed(a: string, b: string): string {
  const [x, y] = [a.split(/(?<=\s)|(?=\s)/), b.split(/(?<=\s)|(?=\s)/)]
  const most = Math.min(x.length, y.length)
  let begin = 0
  while (begin < most && x[begin] === y[begin]) begin++
  let end = 0
  while (end < most - begin && x[x.length - 1 - end] === y[y.length - 1 - end]) end++
  const middle = (parts: string[]) => parts.slice(begin, parts.length - end).join('')
  return `${x.slice(0, begin).join('')}[${middle(x)}|${middle(y)}]${end ? x.slice(-end).join('') : ''}`
}

/** A text with a blank in the place from `begin` to `end`, as a template; null where the blank would touch a letter. */
export function withBlank(text: string, begin: number, end: number): string | null {
  const [before, after] = [text.slice(0, begin), text.slice(end)]
  return isBlank(`${before}_${after}`, before.length, 1) ? `${plain(before)}_${plain(after)}` : null
}
