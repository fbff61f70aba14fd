// Numbers and tokens as people read them.

export function percent(p: number): string {
  if (p >= 0.9995) return '100 %'
  if (p >= 0.0995) return `${(100 * p).toFixed(0)} %`
  if (p >= 0.00995) return `${(100 * p).toFixed(1)} %`
  if (p >= 0.00005) return `${(100 * p).toFixed(2)} %`
  return p > 0 ? '< 0.01 %' : '0 %'
}

/** Three significant digits, and a real minus. */
export function number(x: number): string {
  if (!Number.isFinite(x)) return Number.isNaN(x) ? 'NaN' : x > 0 ? '∞' : '−∞'
  const size = Math.abs(x)
  const text = size !== 0 && (size < 0.001 || size >= 1e6) ? x.toExponential(1) : String(Number(x.toPrecision(3)))
  return text.replace('-', '−')
}

/** 2731392 -> 2.73 M */
export function count(n: number): string {
  for (const [unit, name] of [
    [1e12, 'T'],
    [1e9, 'B'],
    [1e6, 'M'],
    [1e3, 'k'],
  ] as const) {
    if (n >= unit) return `${Number((n / unit).toPrecision(3))} ${name}`
  }
  return String(n)
}

/** A token's text with what cannot be seen made visible. (The server does so for tokens of nothing else: ␣ and ⏎.) */
export function visible(text: string): string {
  if (text === '') return '∅'
  return text
    .replaceAll('\n', '⏎')
    .replaceAll('\t', '⇥')
    .replace(/^ +| +$/g, (spaces) => '·'.repeat(spaces.length))
}

/** The same inside a running text, where a space is a space; and whether a line ends there. */
export function flowing(text: string): { text: string; ends: boolean } {
  return { text: text.replaceAll('␣', ' ').replaceAll('\n', '⏎'), ends: /[\n⏎]/.test(text) }
}
