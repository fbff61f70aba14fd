// The part of Markdown that chat models write, as a tree that the page builds its own elements from: no HTML is made of
// what a model wrote, whatever it wrote. What is not known here stays text.

export type Inline =
  { kind: 'text' | 'code' | 'strong' | 'em'; text: string } | { kind: 'link'; text: string; href: string }

export type Block =
  | { kind: 'paragraph' | 'quote'; parts: Inline[] }
  | { kind: 'heading'; parts: Inline[] }
  | { kind: 'code'; text: string }
  | { kind: 'list'; ordered: boolean; start: number; items: Inline[][] }

const INLINE =
  /`([^`\n]+)`|\*\*([^*\n]+)\*\*|__([^_\n]+)__|\*([^*\s][^*\n]*)\*|\[([^\]\n]+)\]\((https?:\/\/[^\s()]+)\)/g

export function inline(text: string): Inline[] {
  const found: Inline[] = []
  let at = 0
  for (const match of text.matchAll(INLINE)) {
    if (match.index > at) found.push({ kind: 'text', text: text.slice(at, match.index) })
    const [whole, code, strong, alsoStrong, em, label, href] = match
    if (code !== undefined) found.push({ kind: 'code', text: code })
    else if (strong !== undefined || alsoStrong !== undefined)
      found.push({ kind: 'strong', text: strong ?? alsoStrong })
    else if (em !== undefined) found.push({ kind: 'em', text: em })
    else found.push({ kind: 'link', text: label, href })
    at = match.index + whole.length
  }
  if (at < text.length) found.push({ kind: 'text', text: text.slice(at) })
  return found
}

const ITEM = /^\s{0,6}(?:[-*+]|(\d{1,9})[.)])\s+(.*)$/

export function blocks(text: string): Block[] {
  const found: Block[] = []
  const lines = text.split('\n')
  for (let i = 0; i < lines.length;) {
    const line = lines[i]
    const fence = /^\s{0,3}(```+|~~~+)/.exec(line)
    if (fence) {
      const from = ++i
      while (i < lines.length && !lines[i].trimStart().startsWith(fence[1])) i++
      found.push({ kind: 'code', text: lines.slice(from, i++).join('\n') })
    } else if (/^#{1,6}\s/.test(line)) {
      found.push({ kind: 'heading', parts: inline(line.replace(/^#+\s+/, '')) })
      i++
    } else if (ITEM.test(line)) {
      i = list(lines, i, found)
    } else if (/^>\s?/.test(line)) {
      const from = i
      while (i < lines.length && lines[i].startsWith('>')) i++
      const inside = lines.slice(from, i).map((one) => one.replace(/^>\s?/, ''))
      found.push({ kind: 'quote', parts: inline(inside.join('\n')) })
    } else if (line.trim() === '') i++
    else {
      const from = i++
      while (i < lines.length && lines[i].trim() !== '' && !/^\s{0,3}(```|~~~|#{1,6}\s|>)/.test(lines[i])) {
        if (ITEM.test(lines[i])) break
        i++
      }
      found.push({ kind: 'paragraph', parts: inline(lines.slice(from, i).join('\n')) })
    }
  }
  return found
}

/** Read a list from a line on; the line after it. */
function list(lines: string[], from: number, found: Block[]): number {
  const first = ITEM.exec(lines[from])!
  const items: string[] = []
  let i = from
  for (; i < lines.length; i++) {
    const item = ITEM.exec(lines[i])
    if (item) {
      if ((item[1] === undefined) !== (first[1] === undefined)) break
      items.push(item[2])
    } else if (/^\s+\S/.test(lines[i])) items[items.length - 1] += '\n' + lines[i].trim()
    else if (lines[i].trim() !== '' || !ITEM.test(lines[i + 1] ?? '')) break
  }
  const start = Number(first[1] ?? 1)
  found.push({ kind: 'list', ordered: first[1] !== undefined, start, items: items.map(inline) })
  return i
}
