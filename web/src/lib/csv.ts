// Numbers as a table that every spreadsheet reads (RFC 4180).

export type Cell = string | number | boolean | null | undefined
export type Row = Record<string, Cell>

/** Rows with the same names, as CSV with a header line. */
export function csv(rows: Row[]): string {
  if (!rows.length) return ''
  const found = new Set<string>() // of a layer of 512 tokens there are millions of rows: no list of all names
  for (const row of rows) for (const name in row) found.add(name)
  const names = [...found]
  return [names, ...rows.map((row) => names.map((name) => row[name]))]
    .map((line) => line.map(quoted).join(',') + '\r\n')
    .join('')
}

/** A matrix as rows: {[corner]: row's label, column's label: number, ...}; labels that repeat are numbered. */
export function matrixRows(data: ArrayLike<number>, rows: string[], columns: string[], corner = ''): Row[] {
  const names = columns.map((label, i) =>
    columns.indexOf(label) === i && label !== corner ? label : `${label} (${i})`,
  )
  return rows.map((label, r) => ({
    [corner]: label,
    ...Object.fromEntries(names.map((name, c) => [name, data[r * columns.length + c]])),
  }))
}

function quoted(cell: Cell): string {
  if (cell === null || cell === undefined) return ''
  let text = String(cell)
  // A spreadsheet would run a text that begins like a formula; models write such things.
  if (typeof cell === 'string' && /^[=+\-@\t\r]/.test(text)) text = "'" + text
  return /[",\r\n]/.test(text) || text !== text.trim() ? `"${text.replaceAll('"', '""')}"` : text
}
