// "View code" of a comparison: the template, or two sentences as one where they can be.

import { call, curl, heedful, py, type Code } from '../../lib/code'
import { merged } from './template'

interface Asked {
  models: string[]
  texts?: string[]
  template?: string
  n: number
}

export function codeOf(asked: Asked): Code {
  const request = curl('/api/fill', asked)
  const { models, texts = [], n } = asked
  const template = asked.template ?? merged(texts[0], texts[1])
  const most = n || null
  if (template === null) return { python: apart(models[0], texts, most), shell: texts.map((text) => command(models[0], text, n)).join('\n'), curl: request }
  const shell = models.map((model) => command(model, template, n)).join('\n')
  if (models.length === 1) {
    const python = `import heedful

model = ${call('heedful.load', [models[0]])}
filled = ${call('model.fill', [template], { n: most })}
for word, ratio in filled.extremes(filled.log_ratio(0, 1)):
    print(f"{word:20} {ratio:+.2f}")`
    return { python, shell, curl: request }
  }
  const python = `import heedful

for name in ${py(models)}:
    filled = heedful.load(name).fill(${py(template)}, n=${py(most)})
    for i, sentence in enumerate(filled.sentences):
        print(name, sentence, filled.top(i))`
  return { python, shell, curl: request }
}

const command = (model: string, template: string, n: number) => heedful('fill', [model, template, '-n', n])

/** Two sentences that are no one template. */
function apart(model: string, texts: string[], most: number | null): string {
  return `import heedful

model = ${call('heedful.load', [model])}
for text in ${py(texts)}:
    filled = model.fill(text, n=${py(most)})
    for word, probability in filled.top(k=20):
        print(f"{word:20} {probability:.2%}")`
}
