// The steps of a feed-forward network or a mixture of experts.

import type { StepsLayer } from '../../lib/api'
import { slice, type Numbers } from '../../lib/arrays'
import { number } from '../../lib/format'
import { activationOf, added, learned, softmaxed, products } from './explain'
import { at, counted } from './matrix'
import { norm, type LayerWeights, type Made } from './stage'

export function feedforward(layer: StepsLayer, own: LayerWeights): (Made | null)[] {
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
