// The numbers of each view as a table.

import type { AttentionMap, Neuron, Overview, Token } from '../../lib/api'
import { slice, type Numbers } from '../../lib/arrays'
import { matrixRows, type Row } from '../../lib/csv'

/** A line for each weight that is not nothing: weights (layers, heads, from, to), the first layer being `first`. */
export function layerRows(weights: Numbers, from: Token[], to: Token[], first = 0): Row[] {
  const [layers, heads, rows, columns] = weights.shape
  const found: Row[] = []
  let place = 0
  for (let layer = 0; layer < layers; layer++)
    for (let head = 0; head < heads; head++)
      for (let r = 0; r < rows; r++)
        for (let c = 0; c < columns; c++) {
          const weight = weights.data[place++]
          if (weight !== 0)
            found.push({
              layer: first + layer,
              head,
              from: r,
              from_token: from[r].text,
              to: c,
              to_token: to[c].text,
              weight,
            })
        }
  return found
}

/** A line for each weight of a layer. */
export const mapRows = ({ weights: { shape, data }, from, to, layer }: AttentionMap): Row[] =>
  layerRows({ shape: [1, ...shape], data }, from, to, layer)

export const matrixOf = (weights: Numbers, layer: number, tokens: Token[]): Row[] =>
  matrixRows(
    slice(weights, layer).data,
    tokens.map((token) => token.text),
    tokens.map((token) => token.text),
    'token',
  )

export function neuronRows({ tokens, query, keys, products, scores, weights }: Neuron): Row[] {
  const row = (
    token: string,
    score: number | null,
    weight: number | null,
    key: ArrayLike<number>,
    product: ArrayLike<number> | null,
  ): Row => ({
    token,
    score,
    weight,
    ...Object.fromEntries(Array.from(key, (x, i) => [`k${i}`, x])),
    ...Object.fromEntries(Array.from(product ?? [], (x, i) => [`qk${i}`, x])),
  })
  return [
    row('query', null, null, query, null),
    ...tokens.map((token, i) => row(token.text, scores[i], weights[i], slice(keys, i).data, slice(products, i).data)),
  ]
}

/** The largest weight of each head, and of each part of its map. */
export function overviewRows({ thumbnails: { shape, data } }: Overview): Row[] {
  const [layers, heads, side] = shape
  return Array.from({ length: layers * heads }, (_, i) => {
    const part = data.subarray(i * side * side, (i + 1) * side * side)
    return {
      layer: Math.floor(i / heads),
      head: i % heads,
      ...Object.fromEntries(Array.from(part, (x, k) => [`r${Math.floor(k / side)}c${k % side}`, x / 255])),
    }
  })
}
