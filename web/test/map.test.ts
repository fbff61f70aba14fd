import { describe, expect, it } from 'vitest'
import { hit, layout, looks, middle, moment, named, SECONDS, stepped } from '../src/tabs/steps/map'
import { candidates, chosen } from '../src/tabs/steps/sampling'

const image = { shape: [1, 1], data: new Uint8Array(1) }
const one = (id: string, layer: number | null, shape = [5, 8]) => ({ id, layer, shape, full: 1, image })
const LAYER = ['input', 'normed', 'q', 'k', 'v', 'scores', 'weights', 'concatenated', 'residual', 'output']
const map = (layers: number) => ({
  n_heads: 4,
  miniatures: [
    one('embeddings', null),
    ...Array.from({ length: layers }, (_, i) =>
      LAYER.map((id) => one(id, i, ['scores', 'weights'].includes(id) ? [4, 5, 5] : [5, 8])),
    ).flat(),
    one('final', null),
  ],
})

describe('the map of a pass', () => {
  it('has every step of every layer, none above another, within its width', () => {
    for (const [layers, room] of [
      [1, 900],
      [12, 900],
      [30, 320],
    ]) {
      const { tiles, width, height } = layout(map(layers), room)
      expect(tiles.length).toBe(2 + LAYER.length * layers)
      expect(width).toBeGreaterThanOrEqual(room)
      for (const tile of tiles) {
        expect(tile.x).toBeGreaterThanOrEqual(0)
        expect(tile.x + tile.width).toBeLessThanOrEqual(width)
        expect(tile.y + tile.height).toBeLessThanOrEqual(height)
        expect(tile.width).toBeGreaterThanOrEqual(24)
      }
      const places = new Set(tiles.map(({ x, y }) => `${x} ${y}`))
      expect(places.size).toBe(tiles.length)
    }
  })
  it('finds the step, the head and the token under a point', () => {
    const all = layout(map(2), 900)
    const tile = all.tiles.find(({ id, layer }) => id === 'weights' && layer === 1)!
    expect(hit(all, { x: tile.x + tile.width - 3, y: tile.y + tile.height - 3 }, 4, 5)).toEqual({ tile, head: 3 })
    expect(hit(all, { x: middle(all.ribbon, 5, 2), y: all.ribbon.y + 3 }, 4, 5)).toEqual({ token: 2 })
    expect(hit(all, { x: 899, y: all.ribbon.y + 3 }, 4, 5)).toEqual({ token: 4 })
    expect(hit(all, { x: 2, y: all.height - 1 }, 4, 5)).toBeNull()
  })
  it('is walked by the arrow keys', () => {
    const { tiles } = layout(map(2), 900)
    const at = (id: string, layer: number | null) => tiles.findIndex((tile) => tile.id === id && tile.layer === layer)
    expect(stepped(tiles, at('q', 0), 'ArrowDown')).toBe(at('q', 1))
    expect(stepped(tiles, at('q', 0), 'ArrowUp')).toBe(at('q', 0))
    expect(stepped(tiles, at('output', 0), 'ArrowRight')).toBe(at('input', 1))
    expect(stepped(tiles, 0, 'ArrowLeft')).toBe(0)
  })
})

describe('playing a pass', () => {
  const { tiles } = layout(map(3), 900)
  const moments = Array.from({ length: 2001 }, (_, i) => moment(tiles, (i * SECONDS) / 2000))
  it('lights every step in order, within twenty seconds', () => {
    expect(new Set(moments.map(({ tile }) => tile)).size).toBe(tiles.length + 2) // before, each of them, after
    moments.slice(1).forEach((now, i) => expect(now.tile).toBeGreaterThanOrEqual(moments[i].tile))
    expect(moments.at(-2)!.over).toBe(false)
    expect(moments.at(-1)!.over).toBe(true)
  })
  it('fans out before the softmax swells, and drops the token after the bars have grown', () => {
    for (const now of moments) {
      if (now.swell > 0) expect(now.fan).toBe(1)
      if (now.fan > 0) expect(now.layer).toBe(tiles[now.tile].layer)
      if (now.drop > 0) expect(now.bars).toBe(1)
    }
    expect(Math.max(...moments.map(({ swell }) => swell))).toBe(1)
    expect(Math.max(...moments.map(({ drop }) => drop))).toBeCloseTo(1, 9)
  })
})

describe('the lines and the names of a long text', () => {
  it('are as many as can be told apart', () => {
    const attention = { shape: [2, 6, 505], data: new Uint8Array(2 * 6 * 505).fill(40) }
    attention.data[(1 * 6 + 2) * 505 + 7] = 250
    const found = looks({ attention }, 1)
    expect(found.length).toBe(160)
    expect(found[0]).toEqual({ head: 2, to: 7, weight: 250 / 255 })
    expect(looks({ attention }, 1, 3).every(({ head }) => head === 3)).toBe(true)
    const shown = named(505, () => 40, 900 / 505, [504, 7])
    expect(shown.has(504) && shown.has(7)).toBe(true)
    expect(shown.size).toBeLessThan(25)
    expect(named(5, () => 40, 100, [4]).size).toBe(5)
  })
})

describe('the choice among the likeliest of many tokens', () => {
  const logits = Float32Array.from([0, 3, 1, 2, -1])
  const token = (id: number) => ({ id, text: String(id), raw: String(id), special: false })
  it('has the probabilities among all of them', () => {
    const all = candidates({ logits, named: [1, 3].map(token) }, { temperature: 1, topK: 0, topP: 1 })
    const sum = [...logits].reduce((total, x) => total + Math.exp(x), 0)
    expect(all.map((x) => x.probability)).toEqual(
      [Math.exp(3) / sum, Math.exp(2) / sum].map((p) => expect.closeTo(p, 10)),
    )
    expect(all[0].share).toBeCloseTo(all[0].probability, 10)
    expect(chosen(all, 0.99)).toBe(1)
  })
  it('and, when all have names, those of the cuts', () => {
    const named = [1, 3, 2, 0, 4].map(token)
    const two = candidates({ logits, named }, { temperature: 1, topK: 2, topP: 1 })
    expect(two.map((x) => x.cut)).toEqual(['', '', 'top-k', 'top-k', 'top-k'])
    expect(two[0].share + two[1].share).toBeCloseTo(1, 12)
    const half = candidates({ logits, named }, { temperature: 0.5, topK: 0, topP: 0.9 })
    expect(half.map((x) => x.cut)).toEqual(['', '', 'top-p', 'top-p', 'top-p'])
    expect(candidates({ logits, named }, { temperature: 0, topK: 0, topP: 1 }).map((x) => x.share)).toEqual([
      1, 0, 0, 0, 0,
    ])
  })
})
