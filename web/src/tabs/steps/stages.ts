// The steps of a forward pass, left to right, each with its numbers and with how any one of them came about.

import type { LearnedNorm, Steps, StepsLayer, StepsWeights } from '../../lib/api'
import { slice, type Numbers } from '../../lib/arrays'
import { number, visible } from '../../lib/format'
import { activationOf, added, learned, normed, products, softmaxed, taken, turned } from './explain'
import { at, counted, rowOf, type Explanation, type Mark, type Step } from './matrix'

type Made = Omit<Step, 'part' | 'scale' | 'columns'> & Partial<Pick<Step, 'scale' | 'columns'>>
type LayerWeights = StepsWeights['layers'][number]

/** Where one looks: a layer, and a head in it. */
export interface Place {
  layer: number
  head: number
}

export function stages(pass: Steps, weights: StepsWeights, place: Place): Step[] {
  const names = pass.tokens.map((token) => visible(token.text))
  const [layer, own] = [pass.layers[place.layer], weights.layers[place.layer]]
  const part = (title: string, steps: (Made | null)[]): Step[] =>
    steps.flatMap((step) =>
      step ? [{ scale: 'diverging' as const, columns: 'numbers' as const, part: title, ...step }] : [],
    )
  return [
    ...part('Embedding', embedding(pass, weights, names)),
    ...part(`Layer ${place.layer}, attention, head ${place.head}`, [
      ...entrance(pass, place, own),
      ...projections(pass, place, own),
      ...attention(layer, place, names, ends(pass, layer)),
    ]),
    ...part(`Layer ${place.layer}, all heads`, gathered(layer, place, own)),
    ...part(`Layer ${place.layer}, feed-forward`, feedforward(layer, own)),
    ...part('The end', ending(pass, weights, place)),
  ]
}

// --- into the layer --------------------------------------------------------------------------------------------------

function embedding({ tokens, embeddings, positions }: Steps, weights: StepsWeights, names: string[]): (Made | null)[] {
  const scale = weights.embedding_scale
  return [
    {
      id: 'embeddings',
      title: 'Embedding',
      matrix: embeddings,
      about: `Each token is a row of a learned table: ${embeddings.shape[1]} numbers that stand for it wherever it occurs. Tokens that are alike have alike rows.`,
      explain: (row, column) => {
        const learnt = at(weights.embedding, tokens[row].id, column)
        const words = `Number ${column} in row ${tokens[row].id} of the learned table, which is that of “${names[row]}”: equal tokens have equal rows.`
        if (scale === null) return taken(words, `table[${tokens[row].id}, ${column}]`, learnt)
        return {
          words: `${words} All of the table is multiplied by ${number(scale)}.`,
          formula: [learnt, ' × ', scale],
          value: learnt * scale,
          marks: [],
        }
      },
    },
    positions && {
      id: 'positions',
      title: 'Position',
      sign: '+',
      matrix: positions,
      about:
        'Attention does not see order by itself. A vector for each place, added to the token’s, tells the model where in the text it is.',
      explain: (row, column) =>
        taken(
          `Number ${column} of the vector of place ${row}. It is the same whatever token stands there.`,
          `places[${row}, ${column}]`,
          at(weights.positions ?? positions, row, column),
        ),
    },
  ]
}

function entrance(pass: Steps, { layer: index }: Place, own: LayerWeights): (Made | null)[] {
  const { embeddings, positions, layers } = pass
  const layer = layers[index]
  const parts: [string, Numbers][] = [
    ['embeddings', embeddings],
    ...(positions ? [['positions', positions] as [string, Numbers]] : []),
  ]
  return [
    {
      id: 'input',
      title: 'Input',
      sign: index ? '…' : '=',
      matrix: layer.input,
      about: index
        ? `What layer ${index} left on the residual stream: the embedding, and all that the layers so far have added to it.`
        : `${positions ? 'Token and place in one vector' : 'The vector of the token; its place is told to the queries and keys later'}. From here on the layers only add to it: this is the residual stream.`,
      explain: (row, column) => {
        if (index)
          return taken(
            `Number ${column} of what layer ${index} gave: choose that layer to see how.`,
            `layer ${index}, output`,
            at(layers[index - 1].output, row, column),
          )
        return added(
          positions
            ? 'The numbers of the token and of its place.'
            : 'The number of the token; its place is told to the queries and keys later.',
          parts,
          row,
          column,
        )
      },
    },
    layer.normed && own.attention_norm
      ? norm(
          'normed',
          'Norm',
          'input',
          layer.input,
          layer.normed,
          own.attention_norm,
          'Each row is brought to a common size, so that no token shouts. A learned gain and shift follow, one for each column.',
        )
      : null,
  ]
}

/** A norm of all numbers of a row. */
function norm(
  id: string,
  title: string,
  from: string,
  before: Numbers,
  after: Numbers,
  how: LearnedNorm,
  about: string,
  sign?: string,
): Made {
  return {
    id,
    title,
    matrix: after,
    about,
    sign,
    explain: (row, column) => normed(rowOf(before, row), column, how, from ? [{ step: from, row }] : []),
  }
}

// --- attention -------------------------------------------------------------------------------------------------------

/** The steps in which queries and keys are as attention compares them. */
function ends({ rotation }: Steps, layer: StepsLayer): { q: string; k: string } {
  return {
    q: rotation ? 'q_turned' : layer.q_normed ? 'q_normed' : 'q',
    k: rotation ? 'k_turned' : layer.k_normed ? 'k_normed' : 'k',
  }
}

/** Heads of a group share keys and values. */
const shared = (layer: StepsLayer, head: number): number => Math.floor((head * layer.k.shape[0]) / layer.q.shape[0])

function projections(pass: Steps, { layer: index, head }: Place, own: LayerWeights): (Made | null)[] {
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

function attention(layer: StepsLayer, { head }: Place, names: string[], last: { q: string; k: string }): Made[] {
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

function gathered(layer: StepsLayer, { head }: Place, own: LayerWeights): (Made | null)[] {
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

// --- feed-forward ----------------------------------------------------------------------------------------------------

function feedforward(layer: StepsLayer, own: LayerWeights): (Made | null)[] {
  const [before, beforeId] = layer.residual ? [layer.residual, 'residual'] : [layer.input, 'input']
  const [reads, read]: [string, Numbers] = layer.normed2
    ? ['normed2', layer.normed2]
    : layer.residual_style === 'parallel' && layer.normed
      ? ['normed', layer.normed]
      : [beforeId, before]
  return [
    layer.normed2 &&
      norm(
        'normed2',
        'Norm',
        beforeId,
        before,
        layer.normed2,
        own.feedforward_norm!,
        'Again to a common size, before the second half of the layer.',
        layer.residual ? undefined : '↷',
      ),
    ...(layer.shares ? mixed(layer, own, reads, read) : network(layer, own, reads, read)),
    layer.feedforward_after &&
      norm(
        'feedforward_after',
        'Norm',
        'feedforward_out',
        layer.feedforward_out,
        layer.feedforward_after,
        own.feedforward_after!,
        'What was thought is brought to a common size before it is added.',
      ),
    ...output(layer, own),
  ]
}

function network(layer: StepsLayer, own: LayerWeights, reads: string, read: Numbers): (Made | null)[] {
  const { hidden, gated, activated } = layer
  const { name, of } = activationOf(own.act)
  if (!hidden || !activated) return []
  return [
    {
      id: 'hidden',
      title: gated ? 'Gate' : 'Hidden',
      sign: '×W',
      matrix: hidden,
      about: `Each token by itself goes through a small network: first to ${hidden.shape[1]} numbers.`,
      explain: (row, column) =>
        learned(reads, read, row, (gated ? own.gate : own.up)!, column, 'the first matrix of the feed-forward network'),
    },
    gated && {
      id: 'gated',
      title: 'Gated',
      sign: '×W',
      matrix: gated,
      about: 'And to as many others, by a second matrix: the gate says how much of each passes.',
      explain: (row, column) =>
        learned(reads, read, row, own.up!, column, 'the second matrix of the feed-forward network'),
    },
    {
      id: 'activated',
      title: gated ? `${name} × gated` : name,
      matrix: activated,
      about: `${name} ${name === 'tanh' ? 'brings all numbers between −1 and 1' : 'leaves large numbers as they are and brings negative ones near to 0'}: without this bend, all layers would be one matrix.${gated ? ' The other product is multiplied by it, number by number.' : ''}`,
      explain: (row, column) => {
        const x = at(hidden, row, column)
        const passed = gated ? at(gated, row, column) : null
        return {
          words:
            passed === null ? `${name} of the number beside.` : `${name} of the gate, times the number that it gates.`,
          formula: [
            `${name}(`,
            x,
            ')',
            ...(passed === null ? [] : passed < 0 ? [' × (', passed, ')'] : [' × ', passed]),
          ],
          value: of(x) * (passed ?? 1),
          marks: [{ step: 'hidden', row, column }, ...(gated ? [{ step: 'gated', row, column }] : [])],
        }
      },
    },
    {
      id: 'feedforward_out',
      title: 'Feed-forward',
      sign: '×W',
      matrix: layer.feedforward_out,
      about: 'And back to the width of the model.',
      explain: (row, column) =>
        learned('activated', activated, row, own.down!, column, 'the last matrix of the feed-forward network'),
    },
  ]
}

/** A mixture of experts: a router chooses a few networks for each token. */
function mixed(layer: StepsLayer, own: LayerWeights, reads: string, read: Numbers): Made[] {
  const [shares, answers] = [layer.shares!, layer.answers!]
  const asked = (row: number) =>
    counted(shares.shape[1])
      .map(Number)
      .filter((x) => at(shares, row, x) > 0)
  return [
    {
      id: 'shares',
      title: 'Experts',
      sign: '→',
      matrix: shares,
      scale: 'sequential',
      about: `A router chooses the best of ${shares.shape[1]} networks for each token, and how much each of them counts.`,
      explain: (row, column) => {
        const router = learned(reads, read, row, own.router!, column, 'the router')
        const chosen = asked(row)
        if (!chosen.includes(column))
          return {
            ...router,
            words: `This expert’s product with the row is ${number(router.value)}, and others have more: it is not asked.`,
            formula: undefined,
            terms: undefined,
            value: 0,
          }
        const scores = chosen.map((x) => learned(reads, read, row, own.router!, x, 'the router').value)
        return softmaxed(
          chosen.map((x) => `expert ${x}`),
          scores,
          chosen.indexOf(column),
          [{ step: reads, row }],
          'the product of the row and each chosen expert’s column of the router',
        )
      },
    },
    {
      id: 'feedforward_out',
      title: 'Feed-forward',
      sign: 'Σ',
      matrix: layer.feedforward_out,
      about: 'What the chosen networks say, each by its share. Inside they are as that of any layer.',
      explain: (row, column) => {
        const chosen = asked(row)
        return {
          words: `Each expert’s share, times number ${column} of what it says, added up.`,
          ...products(
            chosen.map((x) => `expert ${x}`),
            ['share', 'says'],
            chosen.map((x) => at(shares, row, x)),
            chosen.map((x) => at(slice(answers, x), row, column)),
          ),
          formula: ['sum'],
          marks: [{ step: 'shares', row }],
        }
      },
    },
  ]
}

function output(layer: StepsLayer, own: LayerWeights): (Made | null)[] {
  const thought: [string, Numbers] = layer.feedforward_after
    ? ['feedforward_after', layer.feedforward_after]
    : ['feedforward_out', layer.feedforward_out]
  const parts: [string, Numbers][] = layer.residual
    ? [['residual', layer.residual], thought]
    : [['input', layer.input], ['attention_out', layer.attention_out], thought]
  const words = layer.residual
    ? 'What was there, and what was found.'
    : 'What was there, what attention found, and what the network found beside it.'
  const explain = (row: number, column: number) => added(words, parts, row, column)
  const about = 'Added to the residual stream: what the next layer reads.'
  if (!layer.summed2) return [{ id: 'output', title: 'Output', sign: '+', matrix: layer.output, about, explain }]
  return [
    {
      id: 'summed2',
      title: 'Sum',
      sign: '+',
      matrix: layer.summed2,
      about: 'What the network found is added to what was there.',
      explain,
    },
    norm(
      'output',
      'Output',
      'summed2',
      layer.summed2,
      layer.output,
      own.feedforward_norm!,
      'And to a common size: what the next layer reads.',
    ),
  ]
}

function ending({ layers, final }: Steps, weights: StepsWeights, { layer: index }: Place): (Made | null)[] {
  const shown = index === layers.length - 1
  const about =
    'After the last layer, once more to a common size. The last row decides what comes next: its product with each token’s vector is that token’s logit, below.'
  return [
    weights.norm &&
      norm(
        'final',
        'Last norm',
        shown ? 'output' : '',
        layers[layers.length - 1].output,
        final,
        weights.norm,
        about,
        shown ? undefined : '…',
      ),
  ]
}

/** A column of a step, by its name. */
export const columnName = (step: Step, names: string[], column: number): string =>
  step.columns === 'tokens' ? names[column] : String(column)
