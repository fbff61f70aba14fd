// "View code" of a comparison: the template, or two sentences as one where they can be.

import { call, curl, heedful, py, type Code } from '../../lib/code'
import { merged } from './template'

export interface Asked {
  model: string
  texts?: string[]
  template?: string
  n: number
}

/** `models`: those that the template names; `source`: what heedful.load finds the other one by. */
export function codeOf(asked: Asked, models: string[], source: string): Code {
  const request = curl('/api/fill', asked)
  const { texts = [], n } = asked
  const model = models[0] ?? source
  const template = asked.template ?? merged(texts[0], texts[1])
  const most = n || null
  if (template === null)
    return {
      python: apart(model, texts, most),
      shell: texts.map((text) => heedful('fill', [model, text, '-n', n])).join('\n'),
      curl: request,
    }
  const python = `import heedful

model = ${call('heedful.load', [model])}
filled = ${call('model.fill', [template], { n: most })}
for word, ratio in filled.extremes(filled.log_ratio(0, 1)):
    print(f"{word:20} {ratio:+.2f}")`
  return { python, shell: heedful('fill', [...(models.length ? [] : [model]), template, '-n', n]), curl: request }
}

/** Two sentences that are no one template. */
function apart(model: string, texts: string[], most: number | null): string {
  return `import heedful

model = ${call('heedful.load', [model])}
for text in ${py(texts)}:
    filled = model.fill(text, n=${py(most)})
    for word, probability in filled.top(k=20):
        print(f"{word:20} {probability:.2%}")`
}
