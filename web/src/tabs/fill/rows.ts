// The numbers of a comparison, as a table: a row for each word, a column for each sentence.

import type { Row } from '../../lib/csv'
import { row, type Filled, type Pair } from './compare'

export function rowsOf(filled: Filled | null, pair: Pair): Row[] {
  if (!filled) return []
  const several = new Set(filled.sentences.map((s) => s.model)).size > 1
  const names = filled.sentences.map(({ text, model }) => (several ? `${text} (${model})` : text))
  const columns = filled.sentences.map((_, i) => row(filled, i))
  const unique = names.map((name, i) => (names.indexOf(name) === i ? name : `${name} (${i + 1})`))
  return filled.words.map((word, w) => ({
    word,
    ...Object.fromEntries(columns.map((column, i) => [unique[i], Math.exp(column[w])])),
    'log ratio': columns[pair[1]][w] - columns[pair[0]][w],
  }))
}
