// The steps of a forward pass, left to right, each with its numbers and with how any one of them came about.

import type { Steps, StepsLayer } from '../../lib/api'
import { slice, type Numbers } from '../../lib/arrays'
import { number, visible } from '../../lib/format'
import { activationOf, at, counted, moments, normOf, rowOf, same, sum, type Explanation, type Mark, type Step, type Terms } from './matrix'

type Made = Omit<Step, 'part' | 'scale' | 'columns'> & Partial<Pick<Step, 'scale' | 'columns'>>

/** Where one looks: a layer, and a head in it. */
export interface Place {
  layer: number
  head: number
}

export function stages(pass: Steps, place: Place): Step[] {
  const names = pass.tokens.map((token) => visible(token.text))
  const layer = pass.layers[place.layer]
  const part = (title: string, steps: (Made | null)[]): Step[] =>
    steps.flatMap((step) => (step ? [{ scale: 'diverging' as const, columns: 'numbers' as const, part: title, ...step }] : []))
  return [
    ...part('Embedding', embedding(pass, names)),
    ...part(`Layer ${place.layer + 1}, attention, head ${place.head + 1}`, attention(pass, place, names)),
    ...part(`Layer ${place.layer + 1}, all heads`, gathered(layer, place)),
    ...part(`Layer ${place.layer + 1}, feed-forward`, feedforward(layer)),
    ...part('The end', ending(pass, place)),
  ]
}

// --- parts ------------------------------------------------------------------------------------------------------------

function embedding({ tokens, embeddings, positions }: Steps, names: string[]): (Made | null)[] {
  return [
    {
      id: 'embeddings', title: 'Embedding', matrix: embeddings,
      about: `Each token is a row of a learned table: ${embeddings.shape[1]} numbers that stand for it wherever it occurs. Tokens that are alike have alike rows.`,
      explain: (row, column) => ({ words: `Number ${column} in the learned row of “${names[row]}”, which is number ${tokens[row].id} of the vocabulary. Equal tokens have equal rows.`, marks: [] }),
    },
    positions && {
      id: 'positions', title: 'Position', sign: '+', matrix: positions,
      about: 'Attention does not see order by itself. A vector for each place, added to the token’s, tells the model where in the text it is.',
      explain: (row, column) => ({ words: `Number ${column} of the vector of place ${row}. It is the same whatever token stands there.`, marks: [] }),
    },
  ]
}

function attention(pass: Steps, { layer: index, head }: Place, names: string[]): (Made | null)[] {
  const layer = pass.layers[index]
  const kv = Math.floor((head * layer.k.shape[0]) / layer.q.shape[0]) // heads of a group share keys and values
  const [q, k, v] = [slice(layer.q, head), slice(layer.k, kv), slice(layer.v, kv)]
  const [scores, scaled, masked, weights] = [layer.scores, layer.scaled, layer.masked, layer.weights].map((x) => slice(x, head))
  const [tokens, size] = q.shape
  const source = layer.normed ? 'normed' : 'input'
  const projected = (id: string, title: string, matrix: Numbers, about: string, sign?: string): Made => ({
    id, title, matrix, about, sign,
    explain: (row, column) => learned(source, layer.normed ?? layer.input, row, `column ${column} of this head’s ${title.toLowerCase()} matrix`),
  })
  const square = { columns: 'tokens' as const }
  return [
    {
      id: 'input', title: 'Input', sign: index ? '…' : '=', matrix: layer.input,
      about: index
        ? `What layer ${index} left on the residual stream: the embedding, and all that the layers so far have added to it.`
        : 'Token and place in one vector. From here on the layers only add to it: this is the residual stream.',
      explain: (row, column) => inputOf(pass, index, row, column),
    },
    layer.normed && normed('normed', 'Norm', 'input', layer.input, layer.normed, 'Each row is brought to a common size, so that no token shouts. A learned gain and shift follow, one for each column.'),
    projected('q', 'Query', q, `What each token looks for: its row times a learned matrix, ${size} numbers for this head.`, '×W'),
    projected('k', 'Key', k, 'What each token offers to those who look: times another learned matrix.'),
    projected('v', 'Value', v, 'What each token gives when it is looked at: times a third learned matrix.'),
    {
      id: 'scores', title: 'Scores', sign: 'QKᵀ', matrix: scores, ...square,
      about: 'How well each query (row) fits each key (column): their dot product.',
      explain: (row, column) => ({
        words: `The query of “${names[row]}” times the key of “${names[column]}”, number by number, added up.`,
        terms: products(counted(size), 'query', rowOf(q, row), 'key', rowOf(k, column)),
        formula: `sum = ${number(at(scores, row, column))}`,
        marks: [{ step: 'q', row }, { step: 'k', row: column }],
      }),
    },
    {
      id: 'scaled', title: 'Scaled', sign: `×${number(layer.scale)}`, matrix: scaled, ...square,
      about: `Times ${number(layer.scale)}${Math.abs(layer.scale * Math.sqrt(size) - 1) < 1e-6 ? `, which is 1/√${size}` : ''}: longer vectors have larger products, and a softmax of large numbers would only ever choose one.`,
      explain: (row, column) => ({
        words: 'The score, times the scale.',
        formula: `${number(at(scores, row, column))} × ${number(layer.scale)} = ${number(at(scaled, row, column))}`,
        marks: [{ step: 'scores', row, column }],
      }),
    },
    {
      id: 'masked', title: 'Mask', matrix: masked, ...square,
      about: 'Nobody may look at what comes later, or the next token could be copied instead of predicted. Those scores become −∞, shown empty.',
      explain: (row, column) => maskOf(at(scaled, row, column), at(masked, row, column), names, row, column),
    },
    {
      id: 'weights', title: 'Softmax', matrix: weights, scale: 'sequential', ...square,
      about: 'e to the power of each score, divided by the sum over the row: shares that add up to 1. This is the attention.',
      explain: (row, column) => softmaxOf(masked, weights, names, row, column),
    },
    {
      id: 'heads_out', title: 'Weighted sum', sign: '×V', matrix: slice(layer.heads_out, head),
      about: 'The values of all tokens, mixed by the attention of each row.',
      explain: (row, column) => {
        const seen = counted(tokens).filter((_, s) => at(weights, row, s) > 0)
        return {
          words: `What “${names[row]}” looks at, times number ${column} of its value, added up.`,
          terms: products(seen.map((s) => names[+s]), 'attention', seen.map((s) => at(weights, row, +s)), 'value', seen.map((s) => at(v, +s, column))),
          formula: `sum = ${number(at(slice(layer.heads_out, head), row, column))}`,
          marks: [{ step: 'weights', row }, { step: 'v', column }],
        }
      },
    },
  ]
}

function gathered(layer: StepsLayer, { head }: Place): (Made | null)[] {
  const size = layer.heads_out.shape[2]
  return [
    {
      id: 'concatenated', title: 'Concatenation', sign: '‖', matrix: layer.concatenated,
      about: `The ${layer.heads_out.shape[0]} heads side by side. Choose another head to see where the rest comes from.`,
      explain: (row, column) => {
        const from = Math.floor(column / size)
        const here = from === head
        return { words: `Number ${column % size} of head ${from + 1}${here ? '' : ', which is not the one shown here'}.`, marks: here ? [{ step: 'heads_out', row, column: column % size }] : [] }
      },
    },
    {
      id: 'attention_out', title: 'Projection', sign: '×W', matrix: layer.attention_out,
      about: 'A learned matrix mixes what the heads have found.',
      explain: (row, column) => learned('concatenated', layer.concatenated, row, `column ${column} of the output matrix`),
    },
    layer.residual && {
      id: 'residual', title: layer.residual_style === 'post' ? 'Sum and norm' : 'Residual', sign: '+', matrix: layer.residual,
      about: 'What attention found is added to what was there. Nothing is lost on the way, and gradients flow straight back.',
      explain: (row, column) => added(layer.residual!, [['input', layer.input], ['attention_out', layer.attention_out]], row, column),
    },
  ]
}

function feedforward(layer: StepsLayer): (Made | null)[] {
  const before = layer.residual ?? layer.input
  const beforeId = layer.residual ? 'residual' : 'input'
  const reads = layer.normed2 ? 'normed2' : layer.residual_style === 'parallel' && layer.normed ? 'normed' : beforeId
  const read = layer.normed2 ?? (reads === 'normed' ? layer.normed! : before)
  const activation = layer.hidden && layer.activated && activationOf(layer.hidden, layer.activated)
  const last = layer.activated ? 'activated' : reads
  const summands: [string, Numbers][] = layer.residual
    ? [['residual', layer.residual], ['feedforward_out', layer.feedforward_out]]
    : [['input', layer.input], ['attention_out', layer.attention_out], ['feedforward_out', layer.feedforward_out]]
  return [
    layer.normed2 && normed('normed2', 'Norm', beforeId, before, layer.normed2, 'Again to a common size, before the second half of the layer.'),
    layer.hidden && {
      id: 'hidden', title: 'Hidden', sign: '×W', matrix: layer.hidden,
      about: `Each token by itself goes through a small network: first to ${layer.hidden.shape[1]} numbers.`,
      explain: (row, column) => learned(reads, read, row, `column ${column} of the first matrix of the feed-forward network`),
    },
    layer.activated && {
      id: 'activated', title: activation ?? 'Activation', matrix: layer.activated,
      about: `${activation ? `${activation} leaves large numbers as they are and brings negative ones near to 0` : 'The activation, times a second projection'}: without this bend, all layers would be one matrix.`,
      explain: (row, column) => ({
        words: activation ? `${activation} of the number beside.` : 'The activation of the number beside, times the same place of a second projection (a gated network).',
        formula: activation ? `${activation}(${number(at(layer.hidden!, row, column))}) = ${number(at(layer.activated!, row, column))}` : undefined,
        marks: layer.hidden ? [{ step: 'hidden', row, column }] : [],
      }),
    },
    {
      id: 'feedforward_out', title: 'Feed-forward', sign: '×W', matrix: layer.feedforward_out,
      about: 'And back to the width of the model.',
      explain: (row, column) => learned(last, layer.activated ?? read, row, `column ${column} of the last matrix of the feed-forward network`),
    },
    {
      id: 'output', title: 'Output', sign: '+', matrix: layer.output,
      about: 'Added to the residual stream: what the next layer reads.',
      explain: (row, column) => added(layer.output, summands, row, column),
    },
  ]
}

function ending({ layers, final }: Steps, { layer: index }: Place): (Made | null)[] {
  const last = layers[layers.length - 1]
  if (same(last.output, final)) return []
  const shown = index === layers.length - 1
  return [
    {
      ...normed('final', 'Last norm', shown ? 'output' : '', last.output, final, 'After the last layer, once more to a common size. The last row decides what comes next: its product with each token’s vector is that token’s logit.'),
      sign: shown ? undefined : '…',
    },
  ]
}

// --- how a number came about ------------------------------------------------------------------------------------------

function products(labels: string[], a: string, left: number[], b: string, right: number[]): Terms {
  return { labels, rows: [{ name: a, values: left }, { name: b, values: right }, { name: 'product', values: left.map((x, i) => x * right[i]) }] }
}

/** A product with a matrix that was learned: its row is shown, the matrix is not. */
function learned(step: string, matrix: Numbers, row: number, times: string): Explanation {
  return {
    words: `This row of ${matrix.shape[1]} numbers, times ${times}, added up.`,
    terms: { labels: counted(matrix.shape[1]), rows: [{ name: 'row', values: rowOf(matrix, row) }] },
    marks: [{ step, row }],
  }
}

function added(total: Numbers, parts: [string, Numbers][], row: number, column: number): Explanation {
  const marks: Mark[] = parts.map(([step]) => ({ step, row, column }))
  const plain = same(total, sum(...parts.map(([, matrix]) => matrix)))
  const text = parts.map(([, matrix]) => number(at(matrix, row, column))).join(' + ').replaceAll('+ −', '− ')
  if (plain) return { words: 'What was there, and what was found.', formula: `${text} = ${number(at(total, row, column))}`, marks }
  return { words: 'What was there and what was found, added and brought to a common size over the whole row.', formula: `norm(${text}) = ${number(at(total, row, column))}`, marks: parts.map(([step]) => ({ step, row })) }
}

function inputOf({ embeddings, positions, layers }: Steps, index: number, row: number, column: number): Explanation {
  if (index) return { words: `Number ${column} of what layer ${index} gave: choose that layer to see how.`, marks: [] }
  const parts: [string, Numbers][] = [['embeddings', embeddings], ...(positions ? [['positions', positions] as [string, Numbers]] : [])]
  const found = added(layers[0].input, parts, row, column)
  return { ...found, words: positions ? 'The numbers of the token and of its place.' : 'The number of the token; its place is told to the queries and keys later.' }
}

function normed(id: string, title: string, from: string, before: Numbers, after: Numbers, about: string): Made {
  return {
    id, title, matrix: after, about,
    explain: (row, column) => {
      const { mean, deviation, size } = moments(rowOf(before, row))
      const x = at(before, row, column)
      const norm = normOf(before, after, column)
      const marks = from ? [{ step: from, row }] : []
      const result = number(at(after, row, column))
      if (!norm) return { words: `The number before, ${number(x)}, by the size of its row (${number(size)}) and a learned gain.`, formula: `= ${result}`, marks }
      const gained = ` × ${number(norm.gain)}${Math.abs(norm.shift) < 5e-4 ? '' : ` + ${number(norm.shift)}`.replace('+ −', '− ')} = ${result}`
      if (norm.kind === 'rms') return { words: `Divided by the root of the row’s mean square, ${number(size)}; times the learned gain of this column.`, formula: `${number(x)} ÷ ${number(size)}${gained}`, marks }
      return {
        words: `Less the row’s mean, ${number(mean)}; divided by its standard deviation, ${number(deviation)}; then the learned gain and shift of this column.`,
        formula: `(${number(x)} − ${mean < 0 ? `(${number(mean)})` : number(mean)}) ÷ ${number(deviation)}${gained}`,
        marks,
      }
    },
  }
}

function maskOf(before: number, after: number, names: string[], row: number, column: number): Explanation {
  const marks: Mark[] = [{ step: 'scaled', row, column }]
  if (!Number.isFinite(after) || after < -1e30) {
    return { words: column > row ? `“${names[column]}” comes after “${names[row]}”, which may not look at it.` : `“${names[column]}” is too far back to be looked at.`, formula: `${number(before)} → −∞`, marks }
  }
  if (Math.abs(before - after) < 1e-4 * Math.max(1, Math.abs(before))) return { words: `“${names[row]}” may look at “${names[column]}”: the score stays.`, formula: `${number(before)} → ${number(after)}`, marks }
  return { words: 'The score, and what the distance between the two adds to it.', formula: `${number(before)} → ${number(after)}`, marks }
}

function softmaxOf(masked: Numbers, weights: Numbers, names: string[], row: number, column: number): Explanation {
  const seen = names.map((_, s) => s).filter((s) => at(masked, row, s) > -1e30)
  const scores = seen.map((s) => at(masked, row, s))
  const most = Math.max(...scores)
  const powers = scores.map((x) => Math.exp(x - most))
  const total = powers.reduce((a, b) => a + b, 0)
  const marks: Mark[] = [{ step: 'masked', row }]
  if (!seen.includes(column)) return { words: 'e to the power of −∞ is 0: no attention at all.', formula: '0', marks }
  const mine = powers[seen.indexOf(column)]
  return {
    words: `e to the power of each score of the row (less the largest, ${number(most)}, which changes nothing), and the share of this one in the sum.`,
    terms: { labels: seen.map((s) => names[s]), rows: [{ name: 'score', values: scores }, { name: 'e to it', values: powers }, { name: 'share', values: seen.map((s) => at(weights, row, s)) }], chosen: seen.indexOf(column) },
    formula: `${number(mine)} ÷ ${number(total)} = ${number(at(weights, row, column))}`,
    marks,
  }
}

/** A column of a step, by its name. */
export const columnName = (step: Step, names: string[], column: number): string => (step.columns === 'tokens' ? names[column] : String(column))
