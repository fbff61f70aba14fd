// What one head does with the text that is shown, computed from its weights.

import type { AttentionMap, Token } from '../../lib/api'
import { slice } from '../../lib/arrays'
import { percent, visible } from '../../lib/format'

const MOST = 0.5 // the share of a head's attention that makes a pattern

/** The pattern that most of a head's attention follows, or else its strongest link between two words. */
export function caption({ weights, from, to, which }: AttentionMap, head: number): string {
  const { data } = slice(weights, head)
  const at = (row: number, column: number): number => data[row * to.length + column] ?? 0
  const rows = [...from.keys()].filter((row) => !from[row].special)
  const pattern = which === 'cross' ? '' : common(rows, to, at)
  if (pattern) return pattern
  let best = { weight: 0, row: -1, column: -1 }
  for (const row of rows)
    for (const [column, { special, text }] of to.entries()) {
      const weight = at(row, column)
      const other = which === 'cross' || row !== column
      if (other && !special && text.trim() && weight > best.weight) best = { weight, row, column }
    }
  if (best.row < 0) return ''
  const name = ({ text }: Token): string => `“${visible(text.trim() || text)}”`
  return `The strongest link here: ${name(from[best.row])} to ${name(to[best.column])}, ${percent(best.weight)}`
}

/** Of self-attention: where most of it goes, if that is one kind of place. */
function common(rows: number[], to: Token[], at: (row: number, column: number) => number): string {
  // A first token that reads from left to right has nothing but itself to attend to.
  const causal = rows.every((row) => to.slice(row + 1).every((_, i) => at(row, row + 1 + i) === 0))
  const counted = causal ? rows.filter((row) => row > 0) : rows
  if (!counted.length) return ''
  const special = [...to.keys()].filter((column) => to[column].special)
  const share = (columns: (row: number) => number[]): number =>
    counted.reduce((sum, row) => sum + columns(row).reduce((all, column) => all + at(row, column), 0), 0) /
    counted.length
  const patterns = [
    { name: 'each token itself', share: share((row) => [row]) },
    { name: 'the token before', share: share((row) => (row > 0 ? [row - 1] : [])) },
    { name: 'the token after', share: share((row) => (row + 1 < to.length ? [row + 1] : [])) },
    { name: 'special tokens', share: share(() => special) },
    { name: 'the first token', share: special.includes(0) ? 0 : share(() => [0]) },
  ]
  const most = patterns.reduce((a, b) => (b.share > a.share ? b : a))
  return most.share >= MOST ? `Here ${percent(most.share)} of its attention goes to ${most.name}` : ''
}
