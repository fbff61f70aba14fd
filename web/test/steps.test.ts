import { describe, expect, it } from 'vitest'
import { learned, normed, products, softmaxed, turned } from '../src/tabs/steps/explain'
import { fitting } from '../src/tabs/steps/matrix'

const numbers = (shape: number[], data: number[]) => ({ shape, data: new Float32Array(data) })

describe('how a number came about', () => {
  it('shows as many terms as there is room for, the largest first, and what the others come to', () => {
    const { terms, value } = products(['a', 'b', 'c', 'd'], ['x', 'y'], [1, 2, 3, 4], [10, -50, 1, 0.5], 7)
    expect(value).toBe(-78)
    expect(fitting(terms, 5)).toEqual({
      labels: ['a', 'b', 'c', 'd', 'bias'],
      rows: [
        [1, 2, 3, 4, null],
        [10, -50, 1, 0.5, null],
        [10, -100, 3, 2, 7],
      ],
      chosen: undefined,
    })
    const few = fitting(terms, 4)
    expect(few.labels).toEqual(['b', 'a', '2 more', 'bias'])
    expect(few.rows).toEqual([
      [2, 1, null, null],
      [-50, 10, null, null],
      [-100, 10, 5, 7],
    ])
  })
  it('keeps the one that is looked at in sight', () => {
    const { terms, value } = softmaxed(['a', 'b', 'c'], [3, 1, 2], 1, [])
    const few = fitting(terms!, 2)
    expect([few.labels, few.chosen]).toEqual([['b', '2 more'], 0])
    expect(few.rows[2][0]! + few.rows[2][1]!).toBeCloseTo(1, 12)
    expect(value).toBeCloseTo(Math.exp(1) / (Math.exp(3) + Math.exp(1) + Math.exp(2)), 12)
  })
  it('takes the column of a matrix, and its bias', () => {
    const matrix = { weight: numbers([2, 3], [1, 2, 3, 4, 5, 6]), bias: numbers([2], [0.5, -0.5]) }
    expect(learned('x', numbers([1, 3], [1, 1, 2]), 0, matrix, 1, 'it').value).toBe(20.5)
  })
  it('norms by the deviation or by the size', () => {
    const gain = numbers([2], [2, 3])
    expect(normed([1, 3], 1, { kind: 'layer', gain, shift: numbers([2], [0, 1]), eps: 0 }, []).value).toBeCloseTo(4)
    expect(normed([3, 4], 1, { kind: 'rms', gain, shift: null, eps: 0 }, []).value).toBeCloseTo(
      (4 / Math.sqrt(12.5)) * 3,
    )
  })
  it('turns pairs of either layout, and leaves the rest', () => {
    const quarter = { cos: numbers([1, 1], [0]), sin: numbers([1, 1], [1]) }
    const all = (layout: 'halves' | 'interleaved') =>
      [0, 1, 2].map((column) => turned('q', [1, 2, 5], 0, column, { ...quarter, layout }).value)
    expect(all('halves')).toEqual([-2, 1, 5])
    expect(all('interleaved')).toEqual([-2, 1, 5])
  })
})
