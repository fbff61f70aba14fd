// "View code" of this tab: the same numbers from Python, a picture from the command line, the request of the page.

import type { Model, Which } from '../../lib/api'
import { curl, heedful, py, type Code } from '../../lib/code'

export interface Seen {
  model: Model
  text: string
  target: string
  view: string
  which: Which
  layer: number
  heads: number[] // those that are on, if not all
  head: number
  token: number
  masked: number[]
  /** A chat template wrote the text. */
  rendered?: boolean
}

/** What the library calls the page's kinds of attention. */
function half({ model, which }: Seen): 'encoder' | 'decoder' | 'cross' {
  if (which !== 'self') return which
  return model.kind === 'encoder' ? 'encoder' : 'decoder'
}

function place(seen: Seen): string {
  const kind = half(seen)
  return kind === 'cross' ? `decoder.${seen.layer}.cross` : `${kind}.${seen.layer}.self`
}

export function codeOf(seen: Seen): Code {
  const asked = {
    model: seen.model.id,
    text: seen.text,
    ...(seen.target ? { target: seen.target } : {}),
    which: seen.which,
    masked: seen.masked,
    ...(seen.rendered ? { rendered: true } : {}),
  }
  const kind = half(seen)
  const several = ['encoder-decoder', 'recurrent'].includes(seen.model.kind)
  // An alignment is of one kind alone.
  const options = (what: string) => ({
    kind: several && what !== 'alignment' ? kind : undefined,
    target: seen.target || undefined,
  })
  const show = (what: string, more: Record<string, string | number | undefined> = {}) =>
    seen.masked.length || seen.rendered
      ? undefined
      : heedful('show', [seen.model.source, seen.text], { what, ...more, ...options(what) })
  if (seen.view === 'model')
    return {
      python: python(seen, maps(seen, true)),
      shell: show('heads'),
      curl: curl('/api/attention/overview', asked),
    }
  if (seen.view === 'rollout') {
    const lines = [
      `by_layer = attention_rollout(loaded.model, reading, ${py(kind)})  # (layers, positions, inputs)`,
      `print(by_layer[${seen.layer}])`,
    ]
    return {
      python: python(seen, lines, 'attention_rollout'),
      shell: show('rollout', { layer: seen.layer }),
      curl: curl('/api/rollout', asked),
    }
  }
  if (seen.view === 'neuron') {
    const body = { ...asked, layer: seen.layer, head: seen.head, index: seen.token }
    const shell = show('attention', { layer: seen.layer, head: seen.head }) // the weights that come of it
    return { python: python(seen, neuron(seen), ''), shell, curl: curl('/api/attention/neuron', body) }
  }
  if (seen.view === 'matrix' && seen.layer < 0) {
    const lines = [
      'weights = alignment(loaded.model, reading)  # (target, source), the mean of all heads',
      'print(reading.targets, reading.source)',
      'print(weights)',
    ]
    const { text, which: _, ...rest } = asked
    return {
      python: python(seen, lines, 'alignment'),
      shell: show('alignment'),
      curl: curl('/api/alignment', { ...rest, source: text }),
    }
  }
  const head = seen.heads.length === 1 ? seen.heads[0] : undefined
  const shell = show(seen.view === 'matrix' && kind === 'cross' ? 'alignment' : 'attention', {
    layer: seen.layer,
    head,
  })
  return {
    python: python(seen, maps(seen, false)),
    shell,
    curl: curl('/api/attention', { ...asked, layer: seen.layer }),
  }
}

function maps(seen: Seen, all: boolean): string[] {
  const more = all ? '' : `, layer=${seen.layer}`
  const chosen =
    !all && seen.heads.length ? [`print(weights[${py(seen.heads)}].mean(dim=0))  # of the heads that are on`] : []
  return [
    `maps = attention_weights(loaded.model, reading, ${py(half(seen))}${more})`,
    'for name, weights in maps.items():',
    '    print(name, weights.shape)  # (heads, from, to)',
    ...chosen,
  ]
}

function neuron(seen: Seen): string[] {
  return [
    `with torch.no_grad(), capture(loaded.model, [${py(place(seen) + '.*')}]) as acts:`,
    '    loaded.model(reading.batch)',
    `query = acts[${py(place(seen) + '.queries')}][0, ${seen.head}, ${seen.token}]`,
    `keys = acts[${py(place(seen) + '.keys')}][0]  # (heads, tokens, dimensions)`,
    `keys = keys[${seen.head} * len(keys) // ${Math.max(seen.model.n_heads, 1)}]  # heads of a group share theirs`,
    'print(query * keys)',
    `print(acts[${py(place(seen) + '.scores')}][0, ${seen.head}, ${seen.token}])`,
    `print(acts[${py(place(seen) + '.weights')}][0, ${seen.head}, ${seen.token}])`,
  ]
}

function python(seen: Seen, then: string[], what = 'attention_weights'): string {
  const { masked, model } = seen
  const bert = masked.length > 0 && model.kind === 'encoder' // it reads [MASK]
  const hides = masked.length > 0 && !bert
  const captures = hides || then.some((line) => line.includes('capture('))
  const tokenizer = seen.rendered ? 'loaded.tokenizer.reading_special()' : 'loaded.tokenizer'
  const more = seen.rendered ? ', add_special=False' : seen.target ? `, target=${py(seen.target)}` : ''
  const read = `reading = text_input(loaded.model, ${tokenizer}, ${py(seen.text)}${more})`
  const lines = [
    ...(bert ? ['import dataclasses', ''] : []),
    'import torch',
    '',
    'import heedful',
    ...(bert ? ['from heedful.models.base import Batch'] : []),
    ...(what ? [`from heedful.observe.attention import ${what}`] : []),
    ...(captures ? ['from heedful.observe.capture import capture'] : []),
    'from heedful.observe.inputs import text_input',
    '',
    `loaded = heedful.load(${py(model.source)}, dtype=torch.float32)`,
  ]
  if (bert) {
    lines.push(
      read,
      `ids = [loaded.tokenizer.mask_id if i in ${py(masked)} else id for i, id in enumerate(reading.ids)]`,
    )
    lines.push('reading = dataclasses.replace(reading, batch=Batch(torch.tensor([ids])), ids=ids)', ...then)
  } else if (hides) {
    lines.push(hiding(masked), ...(half(seen) === 'decoder' ? [read] : []))
    lines.push(`with capture(loaded.model, edit=${edits(seen)}):`)
    lines.push(...[...(half(seen) === 'decoder' ? [] : [read]), ...then].map((line) => '    ' + line))
  } else lines.push(read, ...then)
  return lines.join('\n')
}

function edits(seen: Seen): string {
  if (half(seen) === 'decoder') return '{"decoder.*.self.scores": hide(True)}'
  if (seen.model.kind === 'recurrent') return '{"decoder.*.cross.scores": hide(False)}'
  if (seen.model.kind === 'encoder') return '{"encoder.*.self.scores": hide(True)}'
  return '{"encoder.*.self.scores": hide(True), "decoder.*.cross.scores": hide(False)}'
}

const hiding = (masked: number[]): string => `masked = ${py(masked)}


def hide(own):
    """Nobody looks at these tokens, but with own each at itself."""

    def edit(scores):
        made = scores.clone()
        made[..., masked] = -torch.inf
        if own:
            made[..., masked, masked] = scores[..., masked, masked]
        return made

    return edit

`
