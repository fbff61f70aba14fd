// Keys of a box for Python: Tab indents, Shift+Tab takes that back, Enter keeps the indentation.

export interface Edit {
  /** The range that is replaced, and by what. */
  from: number
  to: number
  text: string
}
const INDENT = '    '

/** What a key does to a text with a selection; null: what it does anyway. */
export function edit(key: string, shift: boolean, text: string, start: number, end: number): Edit | null {
  const line = text.lastIndexOf('\n', start - 1) + 1
  if (key === 'Enter' && !shift) {
    const before = text.slice(line, start)
    const deeper = /:\s*(#.*)?$/.test(before) ? INDENT : ''
    return { from: start, to: end, text: '\n' + /^ */.exec(before)![0] + deeper }
  }
  if (key !== 'Tab') return null
  if (!shift && start === end) return { from: start, to: end, text: INDENT.slice((start - line) % INDENT.length) }
  const lines = text.slice(line, end)
  const changed = shift ? lines.replace(/^ {1,4}/gm, '') : lines.replace(/^(?=.)/gm, INDENT)
  return { from: line, to: end, text: changed }
}
