// Markdown as marked's tokens, to be shown by Markdown.svelte as elements: HTML in it stays the text that it is.

import { Lexer, Marked, type MarkedOptions, type Token, type TokenizerExtension, type Tokens } from 'marked'

/** A formula in TeX, between dollars; "from $5 to $6" has none. */
export interface Formula {
  type: 'formula'
  raw: string
  tex: string
  display: boolean
}

const DISPLAYED = /^ *\$\$([\s\S]*?)(?:\$\$[ \t]*(?:\n|$)|$)/
const INLINE = /^\$(?=\S)([^$]*?[^\s$])\$(?!\d)/

const formula = (level: 'block' | 'inline', form: RegExp, begins: RegExp): TokenizerExtension => ({
  name: 'formula',
  level,
  start: (text) => begins.exec(text)?.index,
  tokenizer(text): Formula | undefined {
    const found = form.exec(text)
    return found ? { type: 'formula', raw: found[0], tex: found[1].trim(), display: level === 'block' } : undefined
  },
})

/** Quotes and lists within each other, deeper than anybody reads: as long as they are, they take minutes. */
const DEEP = /^(?:[ \t]*(?:>|[-*+][ \t]|\d{1,9}[.)][ \t])){30}/m

const plain = new Marked({ gfm: true }).defaults
const withFormulas = new Marked({
  gfm: true,
  extensions: [formula('block', DISPLAYED, /^ *\$\$/m), formula('inline', INLINE, /(?<![\\$\w])\$/)],
}).defaults

/** The blocks of a text, or the spans of a line of it; with formulas, $x^2$ and $$x^2$$ are such. */
export function markdown(text: string, { formulas = false, line = false } = {}): Token[] {
  const options = { ...(formulas ? withFormulas : plain) } as MarkedOptions
  if (DEEP.test(text)) return [{ type: 'text', raw: text, text } satisfies Tokens.Text]
  return line ? Lexer.lexInline(text, options) : Lexer.lex(text, options)
}

/** Whether a link may be followed: to a web page, or to a place of this page where its author is trusted. */
export const allowed = (href: string, own: boolean): boolean =>
  /^https?:\/\//i.test(href) || (own && href.startsWith('#/'))

const REFERENCES: Record<string, string> = { amp: '&', lt: '<', gt: '>', quot: '"', apos: "'", nbsp: ' ', '#39': "'" }

/** A text with the usual character references resolved. */
export const unescaped = (text: string): string =>
  text.replace(/&(amp|lt|gt|quot|apos|nbsp|#39);/g, (_, name: string) => REFERENCES[name])
