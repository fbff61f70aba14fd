import { describe, expect, it } from 'vitest'
import { walked } from '../src/lib/canvas'
import { floorsOf, meanOf, strongest, type Scene } from '../src/tabs/attention/lines'

/** Rows of softmax weights, the same in every run; those of a causal model where `causal`. */
function weightsOf(heads: number, n: number, causal = false) {
  let seed = 1
  const random = () => (seed = (seed * 16807) % 2147483647) / 2147483647
  const data = new Float32Array(heads * n * n)
  for (let i = 0; i < heads * n; i++) {
    const row = Array.from({ length: n }, (_, k) => (causal && k > i % n ? 0 : Math.exp(8 * random())))
    const sum = row.reduce((a, b) => a + b)
    data.set(
      row.map((x) => x / sum),
      i * n,
    )
  }
  return { shape: [heads, n, n], data }
}
const all = (n: number) => Array.from({ length: n }, (_, i) => i)

describe('the top of the attention', () => {
  it('is the largest weights of each row that make the share, and no more', () => {
    for (const causal of [false, true]) {
      const weights = weightsOf(2, 50, causal)
      for (const share of [0.05, 0.3, 0.5, 0.95]) {
        const floors = floorsOf(weights, share)!
        floors.forEach((floor, i) => {
          const row = [...weights.data.subarray(50 * i, 50 * (i + 1))].sort((a, b) => b - a)
          const kept = row.filter((x) => x >= floor)
          const sum = (list: number[]) => list.reduce((a, b) => a + b, 0)
          expect(sum(kept)).toBeGreaterThan(share - 1e-5)
          expect(sum(kept.slice(0, -1))).toBeLessThan(share)
        })
      }
    }
  })
  it('is all of it at 100 %, and nothing of a row without weights', () => {
    expect(floorsOf(weightsOf(1, 4), 1)).toBeNull()
    expect([...floorsOf({ shape: [1, 1, 3], data: new Float32Array(3) }, 0.5)!]).toEqual([Infinity])
    expect([...floorsOf({ shape: [1, 1, 3], data: new Float32Array([0, 1, 0]) }, 0.5)!]).toEqual([1])
  })
})

describe('lines', () => {
  const weights = weightsOf(3, 40)
  const scene: Scene = { weights, heads: [0, 2], from: all(40), to: all(40), floors: null }
  it('are the strongest of the heads that are on, the weakest first', () => {
    const found = strongest(scene, { first: 0, end: 40 }, 100)
    expect([found.count, found.cut]).toEqual([100, true])
    expect(new Set(found.head)).toEqual(new Set([0, 2]))
    const best = [...weights.data.subarray(0, 1600), ...weights.data.subarray(3200)].sort((a, b) => b - a)
    expect(Math.min(...found.weight)).toBeGreaterThan(best[110])
    expect(found.weight[99]).toBeGreaterThan(found.weight[0])
  })
  it('may be those of one token', () => {
    const found = strongest(scene, { first: 0, end: 5 }, 1000, { side: 'to', place: 30 })
    expect(new Set(found.to)).toEqual(new Set([30]))
    expect(found.cut).toBe(false)
  })
  it('have a mean, in which what is below its floor counts as nothing', () => {
    const mean = meanOf(scene)
    expect(mean[41]).toBeCloseTo((weights.data[41] + weights.data[3241]) / 2, 6)
    const floors = new Float32Array(120).fill(Infinity)
    expect(Math.max(...meanOf({ ...scene, floors }))).toBe(0)
  })
})

describe('keys', () => {
  it('walk from cell to cell and stay inside', () => {
    expect(walked('ArrowDown', null, 3, 3)).toEqual({ row: 0, column: 0 })
    expect(walked('ArrowRight', { row: 0, column: 2 }, 3, 3)).toEqual({ row: 0, column: 2 })
    expect(walked('ArrowUp', { row: 2, column: 1 }, 3, 3)).toEqual({ row: 1, column: 1 })
    expect(walked('a', { row: 2, column: 1 }, 3, 3)).toBeNull()
  })
})
