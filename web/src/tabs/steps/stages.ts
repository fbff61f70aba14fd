// The steps of a forward pass, left to right, each with its numbers and with how any one of them came about.

import type { Steps, StepsWeights } from '../../lib/api'
import type { Numbers } from '../../lib/arrays'
import { number, visible } from '../../lib/format'
import { added, taken } from './explain'
import { at, type Step } from './matrix'
import { norm, type LayerWeights, type Made, type Place } from './stage'
import { attention, ends, gathered, projections } from './attention'
import { feedforward } from './feedforward'

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
