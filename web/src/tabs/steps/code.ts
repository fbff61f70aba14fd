// "View code" of this tab: the numbers of a layer and the choice of a token in Python, and the requests.

import type { Model } from '../../lib/api'
import { call, curl, heedful, py, type Code } from '../../lib/code'

interface Seen {
  model: Model
  text: string
  layer: number
  temperature: number
  topK: number
  topP: number
}

export function codeOf({ model, text, layer, temperature, topK, topP }: Seen): Code {
  const cuts = { top_k: topK || undefined, top_p: topP < 1 ? topP : undefined }
  const python = [
    'import torch',
    '',
    'import heedful',
    'from heedful.observe.inputs import text_input',
    '',
    `loaded = heedful.load(${py(model.source)}, dtype=torch.float32)`,
    `reading = text_input(loaded.model, loaded.tokenizer, ${py(text)})`,
    `with torch.no_grad(), loaded.capture(["decoder.embeddings", ${py(`decoder.${layer}.*`)}, "logits"]) as acts:`,
    '    loaded.model(reading.batch)',
    'for name, numbers in acts.items():',
    '    print(name, tuple(numbers.shape))',
    `weights = acts[${py(`decoder.${layer}.self.weights`)}][0]  # (heads, from, to)`,
    'print(weights)',
    '',
    `print(${call('loaded.generate', [text], { max_tokens: 1, temperature, ...cuts })})`,
  ].join('\n')
  const flags = { 'max-tokens': 1, temperature, 'top-k': cuts.top_k, 'top-p': cuts.top_p }
  return {
    python,
    shell: heedful('generate', [model.source, text], flags),
    curl: curl('/api/steps', { model: model.id, text }),
  }
}
