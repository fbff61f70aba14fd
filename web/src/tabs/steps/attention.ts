// The steps of attention: projections, scores, softmax, heads, and their sum on the residual stream.

import type { LearnedNorm, Steps, StepsLayer } from '../../lib/api'
import { slice, type Numbers } from '../../lib/arrays'
import { number } from '../../lib/format'
import { added, learned, normed, softmaxed, taken, turned, products } from './explain'
import { at, counted, rowOf, type Explanation, type Mark } from './matrix'
import { norm, type LayerWeights, type Made, type Place } from './stage'

/** The steps in which queries and keys are as attention compares them. */
export function ends({ rotation }: Steps, layer: StepsLayer): { q: string; k: string } {
  return {
    q: rotation ? 'q_turned' : layer.q_normed ? 'q_normed' : 'q',
    k: rotation ? 'k_turned' : layer.k_normed ? 'k_normed' : 'k',
  }
}

/** Heads of a group share keys and values. */
const shared = (layer: StepsLayer, head: number): number => Math.floor((head * layer.k.shape[0]) / layer.q.shape[0])

export function projections(pass: Steps, { layer: index, head }: Place, own: LayerWeights): (Made | null)[] {
  const layer = pass.layers[index]
  const group = shared(layer, head)
  const size = layer.q.shape[2]
  const [source, read] = layer.normed ? ['normed', layer.normed] : ['input', layer.input]
  const projected = (id: 'q' | 'k' | 'v', title: string, of: Numbers, which: number, about: string): Made => ({
    id,
    title,
    about,
    sign: '×W',
    matrix: slice(of, which),
    explain: (row, column) =>
      learned(
        source,
        read,
        row,
        own[({ q: 'query', k: 'key', v: 'value' } as const)[id]],
        which * size + column,
        `the matrix of all heads’ ${{ q: 'queries', k: 'keys', v: 'values' }[id]}`,
      ),
  })
  const byHead = (
    id: 'q' | 'k',
    title: string,
    before: Numbers,
    after: Numbers,
    how: LearnedNorm,
    which: number,
  ): Made => ({
    id: `${id}_normed`,
    title,
    matrix: slice(after, which),
    about: 'Brought to a common size, which keeps the scores small; a learned gain for each column follows.',
    explain: (row, column) => {
      const wide = how.gain!.data.length !== size // over all heads
      const heads = wide ? Array.from({ length: before.shape[0] }, (_, h) => h) : [which]
      const values = heads.flatMap((h) => rowOf(slice(before, h), row))
      return normed(values, wide ? which * size + column : column, how, [{ step: id, row }])
    },
  })
  const rotated = (id: 'q' | 'k', title: string, before: Numbers, which: number): Made | null =>
    pass.rotation && {
      id: `${id}_turned`,
      title,
      matrix: slice(layer[id], which),
      sign: '↻',
      about:
        'Pairs of numbers are turned by an angle that grows with the place: this is how the model knows where a token stands.',
      explain: (row, column) =>
        turned(
          layer[`${id}_normed`] ? `${id}_normed` : id,
          rowOf(slice(before, which), row),
          row,
          column,
          pass.rotation!,
        ),
    }
  return [
    projected(
      'q',
      'Query',
      layer.q_raw,
      head,
      `What each token looks for: its row times a learned matrix, ${size} numbers for this head.`,
    ),
    projected(
      'k',
      'Key',
      layer.k_raw,
      group,
      'What each token offers to those who look: times another learned matrix.',
    ),
    projected(
      'v',
      'Value',
      layer.v,
      group,
      'What each token gives when it is looked at: times a third learned matrix.',
    ),
    layer.q_normed && byHead('q', 'Query, normed', layer.q_raw, layer.q_normed, own.query_norm!, head),
    layer.k_normed && byHead('k', 'Key, normed', layer.k_raw, layer.k_normed, own.key_norm!, group),
    rotated('q', 'Query, turned', layer.q_normed ?? layer.q_raw, head),
    rotated('k', 'Key, turned', layer.k_normed ?? layer.k_raw, group),
  ]
}

export function attention(layer: StepsLayer, { head }: Place, names: string[], last: { q: string; k: string }): Made[] {
  const group = shared(layer, head)
  const [q, k, v] = [slice(layer.q, head), slice(layer.k, group), slice(layer.v, group)]
  const [scores, scaled, masked, weights] = [layer.scores, layer.scaled, layer.masked, layer.weights].map((x) =>
    slice(x, head),
  )
  const [tokens, size] = q.shape
  const square = { columns: 'tokens' as const }
  return [
    {
      id: 'scores',
      title: 'Scores',
      sign: 'QKᵀ',
      matrix: scores,
      ...square,
      about: 'How well each query (row) fits each key (column): their dot product.',
      explain: (row, column) => ({
        words: `The query of “${names[row]}” times the key of “${names[column]}”, number by number, added up.`,
        ...products(counted(size), ['query', 'key'], rowOf(q, row), rowOf(k, column)),
        formula: ['sum'],
        marks: [
          { step: last.q, row },
          { step: last.k, row: column },
        ],
      }),
    },
    {
      id: 'scaled',
      title: 'Scaled',
      sign: `×${number(layer.scale)}`,
      matrix: scaled,
      ...square,
      about: `Times ${number(layer.scale)}${Math.abs(layer.scale * Math.sqrt(size) - 1) < 1e-6 ? `, which is 1/√${size}` : ''}: longer vectors have larger products, and a softmax of large numbers would only ever choose one.`,
      explain: (row, column) => {
        const score = at(scores, row, column)
        return {
          words: 'The score, times the scale.',
          formula: [score, ' × ', layer.scale],
          value: score * layer.scale,
          marks: [{ step: 'scores', row, column }],
        }
      },
    },
    {
      id: 'masked',
      title: 'Mask',
      matrix: masked,
      ...square,
      about: `Nobody may look at what comes later, or the next token could be copied instead of predicted. Those scores become −∞, shown empty.${layer.softcap ? ` Before that all are brought within ±${layer.softcap}.` : ''}`,
      explain: (row, column) =>
        maskOf(at(scaled, row, column), at(masked, row, column), layer.softcap, names, row, column),
    },
    {
      id: 'weights',
      title: 'Softmax',
      matrix: weights,
      scale: 'sequential',
      ...square,
      about:
        'e to the power of each score, divided by the sum over the row: shares that add up to 1. This is the attention.',
      explain: (row, column) => {
        const seen = names.map((_, s) => s).filter((s) => at(masked, row, s) > -1e30)
        const marks: Mark[] = [{ step: 'masked', row }]
        if (!seen.includes(column)) return { words: 'e to the power of −∞ is 0: no attention at all.', value: 0, marks }
        return softmaxed(
          seen.map((s) => names[s]),
          seen.map((s) => at(masked, row, s)),
          seen.indexOf(column),
          marks,
        )
      },
    },
    {
      id: 'heads_out',
      title: 'Weighted sum',
      sign: '×V',
      matrix: slice(layer.heads_out, head),
      about: 'The values of all tokens, mixed by the attention of each row.',
      explain: (row, column) => {
        const seen = counted(tokens)
          .map(Number)
          .filter((s) => at(weights, row, s) > 0)
        return {
          words: `The attention of “${names[row]}” to each token, times number ${column} of that token’s value, added up.`,
          ...products(
            seen.map((s) => names[s]),
            ['attention', 'value'],
            seen.map((s) => at(weights, row, s)),
            seen.map((s) => at(v, s, column)),
          ),
          formula: ['sum'],
          marks: [
            { step: 'weights', row },
            { step: 'v', column },
          ],
        }
      },
    },
  ]
}

function maskOf(
  before: number,
  after: number,
  softcap: number | null,
  names: string[],
  row: number,
  column: number,
): Explanation {
  const marks: Mark[] = [{ step: 'scaled', row, column }]
  if (!Number.isFinite(after) || after < -1e30) {
    return {
      words:
        column > row
          ? `“${names[column]}” comes after “${names[row]}”, which may not look at it.`
          : `“${names[column]}” is too far back to be looked at.`,
      value: -Infinity,
      marks,
    }
  }
  const words = `“${names[row]}” may look at “${names[column]}”: the score stays`
  if (softcap)
    return {
      words: `${words}, brought within ±${softcap}.`,
      formula: [softcap, ' × tanh(', before, ' ÷ ', softcap, ')'],
      value: softcap * Math.tanh(before / softcap),
      marks,
    }
  return { words: `${words}.`, formula: ['score'], value: before, marks }
}

export function gathered(layer: StepsLayer, { head }: Place, own: LayerWeights): (Made | null)[] {
  const size = layer.heads_out.shape[2]
  const found: [string, Numbers] = layer.attention_after
    ? ['attention_after', layer.attention_after]
    : ['attention_out', layer.attention_out]
  const why =
    'What attention found is added to what was there. Nothing is lost on the way, and gradients flow straight back.'
  const sum = (row: number, column: number) =>
    added('What was there, and what was found.', [['input', layer.input], found], row, column)
  return [
    {
      id: 'concatenated',
      title: 'Concatenation',
      sign: '‖',
      matrix: layer.concatenated,
      about: `The ${layer.heads_out.shape[0]} heads side by side. Choose another head to see where the rest comes from.`,
      explain: (row, column) => {
        const from = Math.floor(column / size)
        const marks = from === head ? [{ step: 'heads_out', row, column: column % size }] : []
        return taken(
          `Number ${column % size} of head ${from + 1}${from === head ? '' : ', which is not the one shown here'}.`,
          `head ${from + 1}, number ${column % size}`,
          at(slice(layer.heads_out, from), row, column % size),
          marks,
        )
      },
    },
    {
      id: 'attention_out',
      title: 'Projection',
      sign: '×W',
      matrix: layer.attention_out,
      about: 'A learned matrix mixes what the heads have found.',
      explain: (row, column) =>
        learned('concatenated', layer.concatenated, row, own.output, column, 'the output matrix'),
    },
    layer.attention_after &&
      norm(
        'attention_after',
        'Norm',
        'attention_out',
        layer.attention_out,
        layer.attention_after,
        own.attention_after!,
        'What was found is brought to a common size before it is added.',
      ),
    layer.summed && { id: 'summed', title: 'Sum', sign: '+', matrix: layer.summed, about: why, explain: sum },
    layer.residual &&
      (layer.summed
        ? norm(
            'residual',
            'Norm',
            'summed',
            layer.summed,
            layer.residual,
            own.attention_norm!,
            'The sum is brought to a common size: so did the first Transformers, and later ones norm before each half of a layer.',
          )
        : { id: 'residual', title: 'Residual', sign: '+', matrix: layer.residual, about: why, explain: sum }),
  ]
}
