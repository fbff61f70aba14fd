import { describe, expect, it } from 'vitest'
import type { AttentionMap, Token } from '../src/lib/api'
import { caption } from '../src/tabs/attention/caption'

const token = (text: string, special = false): Token => ({ id: 0, text, raw: text, special })
const map = (rows: number[][], tokens: Token[], which: AttentionMap['which'] = 'self') =>
  ({
    weights: { shape: [1, rows.length, rows[0].length], data: Float32Array.from(rows.flat()) },
    from: tokens,
    to: tokens,
    which,
  }) as unknown as AttentionMap

describe('the caption of a head', () => {
  const words = ['a', 'b', 'c'].map((text) => token(text))
  it('says what this text shows', () => {
    const before = [
      [1, 0, 0],
      [0.8, 0.2, 0],
      [0.1, 0.7, 0.2],
    ]
    expect(caption(map(before, words), 0)).toBe('Here 75 % of its attention goes to the token before')
    const itself = before.map((row, i) => row.map((_, k) => Number(i === k)))
    expect(caption(map(itself, words), 0)).toBe('Here 100 % of its attention goes to each token itself')
  })
  it('names the strongest link where there is no pattern, and special tokens are none', () => {
    const mixed = [
      [0.4, 0.2, 0.4],
      [0.25, 0.3, 0.45],
      [0.46, 0.24, 0.3],
    ]
    expect(caption(map(mixed, words), 0)).toBe('The strongest link here: “c” to “a”, 46 %')
    const special = [token('[CLS]', true), ...words.slice(1)]
    expect(caption(map(mixed, special), 0)).toBe('The strongest link here: “b” to “c”, 45 %')
  })
})
