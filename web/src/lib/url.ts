// The address of what is on the screen: #/attention?model=shakespeare&text=To%20be&layer=2. A link reopens it.

export type Value = string | number | boolean | string[] | number[]
export type Values = Record<string, Value>

export interface Place {
  tab: string
  params: Record<string, string>
}

export function parseHash(hash: string): Place {
  const [path, ...query] = hash.replace(/^#?\/?/, '').split('?')
  return { tab: path, params: Object.fromEntries(new URLSearchParams(query.join('?'))) }
}

export function makeHash({ tab, params }: Place): string {
  const query = new URLSearchParams(params).toString().replaceAll('+', '%20')
  return `#/${tab}${query && '?' + query}`
}

/** What an address says of a setting, of the kind that its default has; the default where that makes no sense. */
export function read<T extends Value>(text: string | undefined, usual: T): T {
  if (text === undefined) return usual
  if (typeof usual === 'string') return text as T
  if (typeof usual === 'boolean') return (text === 'true' ? true : text === 'false' ? false : usual) as T
  if (typeof usual === 'number')
    return (text.trim() !== '' && Number.isFinite(Number(text)) ? Number(text) : usual) as T
  try {
    const found: unknown = JSON.parse(text)
    const kinds = new Set(usual.map((x) => typeof x))
    const ok = Array.isArray(found) && found.every((x) => ['string', 'number'].includes(typeof x))
    return (ok && (!kinds.size || found.every((x) => kinds.has(typeof x))) ? found : usual) as T
  } catch {
    return usual
  }
}

export function write(value: Value): string {
  return Array.isArray(value) ? JSON.stringify(value) : String(value)
}

/** The settings that differ from the usual ones, as an address has them. */
export function changed(values: Values, usual: Values): Record<string, string> {
  const pairs = Object.keys(usual).map((name) => [name, write(values[name]), write(usual[name])])
  return Object.fromEntries(pairs.filter(([, now, then]) => now !== then).map(([name, now]) => [name, now]))
}
