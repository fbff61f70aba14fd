// Texts that are too long: for the server, by their characters, and for a model, by their tokens. What is offered is
// always their end.

/** The most characters of a text that the server reads. */
export const MOST_CHARACTERS = 20_000
/** The most tokens that are looked into. */
export const MOST_TOKENS = 512

/** What is said of a text of too many tokens. */
export const tooMany = (n: number, most: number, what = 'The text'): string =>
  `${what} has ${n.toLocaleString('en')} tokens, and at most ${most.toLocaleString('en')} are read here: shorten it.`

/** As much of the end of a text of n tokens as has at most so many, by words if there are some. */
export function endOf(text: string, n: number, most: number): string {
  if (n <= most) return text
  const letters = [...text]
  const end = letters.slice(-Math.max(1, Math.floor((letters.length * most * 0.9) / n))).join('')
  return end.replace(/^\S*\s+(?=\S)/, '')
}

/** The last characters of a text, and its first ones; none is half of a character. */
export const last = (text: string, most: number): string => text.slice(-most).replace(/^[\udc00-\udfff]/, '')
export const first = (text: string, most: number): string => text.slice(0, most).replace(/[\ud800-\udbff]$/, '')
