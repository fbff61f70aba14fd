// Markdown as data, to be shown by Markdown.svelte: paragraphs, headings, lists, quotes, tables, code, emphasis, links,
// and formulas where they are asked for. What is none of these, HTML above all, stays the text that it is.

export type Inline =
  | { kind: 'text'; text: string }
  | { kind: 'code'; text: string }
  | { kind: 'formula'; tex: string }
  | { kind: 'strong'; parts: Inline[] }
  | { kind: 'em'; parts: Inline[] }
  | { kind: 'link'; href: string; parts: Inline[] }
export type Block =
  | { kind: 'paragraph'; parts: Inline[] }
  | { kind: 'quote'; parts: Inline[] }
  | { kind: 'heading'; level: number; parts: Inline[] }
  | { kind: 'list'; ordered: boolean; start: number; items: Inline[][] }
  | { kind: 'table'; head: Inline[][]; rows: Inline[][][] }
  | { kind: 'formula'; tex: string }
  | { kind: 'code'; text: string }

const FENCE = /^\s*(```+|~~~+)/
const HEADING = /^(#{1,6})\s+(.*?)\s*#*$/
const ITEM = /^\s*(?:[-*+]|(\d{1,9})[.)])\s+(.*)$/
const QUOTE = /^\s*>\s?(.*)$/
const RULE = /^\s*([-*_])(\s*\1){2,}\s*$/
const ROW = /^\s*\|(.*)\|\s*$/
const FORMULA = /^\s*\$\$([\s\S]*?)(?:\$\$|$)/

/** The blocks of a text; with formulas, $x^2$ and $$x^2$$ are such, and no dollars. */
export function markdown(text: string, formulas = false): Block[] {
  const spans = (line: string): Inline[] => inline(line, formulas)
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
    } else if (formulas && FORMULA.test(line)) {
      const rest = lines.slice(at).join('\n')
      const [all, tex] = FORMULA.exec(rest)!
      lines.splice(at, Infinity, ...rest.slice(all.length).split('\n'))
      found.push({ kind: 'formula', tex: tex.trim() })
    } else if (line.trim() === '' || RULE.test(line)) at++
    else if (heading) {
      at++
      found.push({ kind: 'heading', level: heading[1].length, parts: spans(heading[2]) })
    } else if (item) {
      const items: string[] = []
      for (const next of until((one) => one.trim() === '' || (!ITEM.test(one) && !/^\s/.test(one)))) {
        const begun = ITEM.exec(next)
        if (begun) items.push(begun[2])
        else items[items.length - 1] += ' ' + next.trim()
      }
      const ordered = item[1] !== undefined
      found.push({ kind: 'list', ordered, start: ordered ? Number(item[1]) : 1, items: items.map(spans) })
    } else if (ROW.test(line) && /^[\s|:-]+$/.test(lines[at + 1] ?? '')) {
      const [head, , ...rows] = until((next) => !ROW.test(next)).map((row) => cells(row).map(spans))
      found.push({ kind: 'table', head, rows })
    } else if (QUOTE.test(line)) {
      const quoted = until((next) => !QUOTE.test(next)).map((next) => QUOTE.exec(next)![1])
      found.push({ kind: 'quote', parts: spans(quoted.join(' ')) })
    } else {
      const other = (next: string): boolean =>
        next.trim() === '' ||
        [FENCE, HEADING, ITEM, QUOTE, RULE, ...(formulas ? [FORMULA] : [])].some((form) => form.test(next))
      at++
      found.push({ kind: 'paragraph', parts: spans([line, ...until(other)].map((one) => one.trim()).join(' ')) })
    }
  }
  return found
}

/** The cells of a table's row. */
const cells = (row: string): string[] =>
  ROW.exec(row)![1]
    .split(/(?<!\\)\|/)
    .map((cell) => cell.replaceAll('\\|', '|').trim())

const TEX = /(?<![\\$\w])\$(?=\S)([^$]*?[^\s$])\$(?!\d)/ // not the dollars of "from $5 to $6"
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
const WITH_FORMULAS = new RegExp(`${SPAN.source}|${TEX.source}`) // 9: TeX

/** A line's text with its emphasis, code and links, and formulas where they are asked for. */
export function inline(text: string, formulas = false): Inline[] {
  const found: Inline[] = []
  const say = (more: string): void => {
    const last = found.at(-1)
    if (last?.kind === 'text') last.text += more
    else if (more) found.push({ kind: 'text', text: more })
  }
  const form = formulas ? WITH_FORMULAS : SPAN
  let rest = text
  for (let span = form.exec(rest); span; span = form.exec(rest)) {
    const [all, escaped, , code, strong, star, score, label, href, tex] = span
    say(rest.slice(0, span.index))
    if (escaped !== undefined) say(escaped)
    else if (code !== undefined) found.push({ kind: 'code', text: code.trim() || code })
    else if (tex !== undefined) found.push({ kind: 'formula', tex })
    else if (strong !== undefined) found.push({ kind: 'strong', parts: inline(strong, formulas) })
    else if (label === undefined) found.push({ kind: 'em', parts: inline(star ?? score, formulas) })
    else if (allowed(href)) found.push({ kind: 'link', href, parts: inline(label, formulas) })
    else say(all)
    rest = rest.slice(span.index + all.length)
  }
  say(rest)
  return found
}

/** Links go to a place of this page or to a web page, and nowhere else. */
const allowed = (href: string): boolean => /^(#\/|https?:\/\/)/.test(href)
