// Markdown as data, to be shown by Markdown.svelte: paragraphs, headings, lists, quotes, code, emphasis and links. What
// is none of these, HTML above all, stays the text that it is.

export type Inline =
  | { kind: 'text'; text: string }
  | { kind: 'code'; text: string }
  | { kind: 'strong'; parts: Inline[] }
  | { kind: 'em'; parts: Inline[] }
  | { kind: 'link'; href: string; parts: Inline[] }
export type Block =
  | { kind: 'paragraph'; parts: Inline[] }
  | { kind: 'quote'; parts: Inline[] }
  | { kind: 'heading'; level: number; parts: Inline[] }
  | { kind: 'list'; ordered: boolean; start: number; items: Inline[][] }
  | { kind: 'code'; text: string }

const FENCE = /^\s*(```+|~~~+)/
const HEADING = /^(#{1,6})\s+(.*?)\s*#*$/
const ITEM = /^\s*(?:[-*+]|(\d{1,9})[.)])\s+(.*)$/
const QUOTE = /^\s*>\s?(.*)$/
const RULE = /^\s*([-*_])(\s*\1){2,}\s*$/

/** The blocks of a text. */
export function markdown(text: string): Block[] {
  const lines = text.replace(/\r\n?/g, '\n').split('\n')
  const found: Block[] = []
  let at = 0
  const until = (ends: (line: string) => boolean): string[] => {
    const from = at
    while (at < lines.length && !ends(lines[at])) at++
    return lines.slice(from, at)
  }
  while (at < lines.length) {
    const line = lines[at]
    const fence = FENCE.exec(line)?.[1]
    const heading = HEADING.exec(line)
    const item = ITEM.exec(line)
    if (fence) {
      at++
      found.push({ kind: 'code', text: until((next) => next.trim() === fence).join('\n') })
      at++
    } else if (line.trim() === '' || RULE.test(line)) at++
    else if (heading) {
      at++
      found.push({ kind: 'heading', level: heading[1].length, parts: inline(heading[2]) })
    } else if (item) {
      const items: string[] = []
      for (const next of until((one) => one.trim() === '' || (!ITEM.test(one) && !/^\s/.test(one)))) {
        const begun = ITEM.exec(next)
        if (begun) items.push(begun[2])
        else items[items.length - 1] += ' ' + next.trim()
      }
      const ordered = item[1] !== undefined
      found.push({ kind: 'list', ordered, start: ordered ? Number(item[1]) : 1, items: items.map(inline) })
    } else if (QUOTE.test(line)) {
      const quoted = until((next) => !QUOTE.test(next)).map((next) => QUOTE.exec(next)![1])
      found.push({ kind: 'quote', parts: inline(quoted.join(' ')) })
    } else {
      const other = (next: string): boolean =>
        next.trim() === '' || [FENCE, HEADING, ITEM, QUOTE, RULE].some((form) => form.test(next))
      at++
      found.push({ kind: 'paragraph', parts: inline([line, ...until(other)].map((one) => one.trim()).join(' ')) })
    }
  }
  return found
}

const SPAN = new RegExp(
  [
    /\\([\\`*_{}[\]()#+\-.!<>])/, // 1: escaped
    /(`+)(.+?)\2/, // 3: code
    /\*\*(?=\S)(.+?)\*\*/, // 4: strong
    /\*(?=[^\s*])(.+?)\*/, // 5: em
    /(?<!\w)_(?=[^\s_])(.+?)_(?!\w)/, // 6: em
    /\[([^\]]+)\]\(([^()\s]+)\)/, // 7, 8: link
  ]
    .map((one) => one.source)
    .join('|'),
)

/** A line's text with its emphasis, code and links. */
export function inline(text: string): Inline[] {
  const found: Inline[] = []
  const say = (more: string): void => {
    const last = found.at(-1)
    if (last?.kind === 'text') last.text += more
    else if (more) found.push({ kind: 'text', text: more })
  }
  let rest = text
  for (let span = SPAN.exec(rest); span; span = SPAN.exec(rest)) {
    const [all, escaped, , code, strong, star, score, label, href] = span
    say(rest.slice(0, span.index))
    if (escaped !== undefined) say(escaped)
    else if (code !== undefined) found.push({ kind: 'code', text: code.trim() || code })
    else if (strong !== undefined) found.push({ kind: 'strong', parts: inline(strong) })
    else if (label === undefined) found.push({ kind: 'em', parts: inline(star ?? score) })
    else if (allowed(href)) found.push({ kind: 'link', href, parts: inline(label) })
    else say(all)
    rest = rest.slice(span.index + all.length)
  }
  say(rest)
  return found
}

/** Links go to a place of this page or to a web page, and nowhere else. */
const allowed = (href: string): boolean => /^(#\/|https?:\/\/)/.test(href)
