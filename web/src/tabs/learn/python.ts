// Python, cut into what is coloured: comments, strings, keywords, numbers, and the rest.

export type Kind = 'comment' | 'string' | 'keyword' | 'number' | ''
export interface Piece {
  kind: Kind
  text: string
}

const KEYWORDS =
  'and as assert async await break class continue def del elif else except False finally for from global if import in is lambda None nonlocal not or pass raise return True try while with yield'
const PIECE = new RegExp(
  [
    /(#[^\n]*)/, // 1: comment
    /((?<!\w)[rbfuRBFU]{0,2}(?:"""[\s\S]*?(?:"""|$)|'''[\s\S]*?(?:'''|$)|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?))/, // 2
    new RegExp(`\\b(${KEYWORDS.replaceAll(' ', '|')})\\b`), // 3: keyword
    /(?<![\w.])(\d[\d_]*(?:\.\d*)?(?:[eE][+-]?\d+)?)/, // 4: number
  ]
    .map((one) => one.source)
    .join('|'),
  'g',
)
const KINDS: Kind[] = ['', 'comment', 'string', 'keyword', 'number']

/** The pieces of a program, in order; together they are its text. */
export function pieces(source: string): Piece[] {
  const found: Piece[] = []
  let end = 0
  for (const match of source.matchAll(PIECE)) {
    if (match.index > end) found.push({ kind: '', text: source.slice(end, match.index) })
    found.push({ kind: KINDS[match.findIndex((text, i) => i > 0 && text !== undefined)], text: match[0] })
    end = match.index + match[0].length
  }
  if (end < source.length) found.push({ kind: '', text: source.slice(end) })
  return found
}
