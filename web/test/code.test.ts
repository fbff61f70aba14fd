import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest'
import type { Model } from '../src/lib/api'
import type { Code } from '../src/lib/code'
import { codeOf as attention, type Seen } from '../src/tabs/attention/code'
import { codeOf as chat } from '../src/tabs/chat/how'
import { codeOf as complete } from '../src/tabs/complete/how'
import { biasCode } from '../src/tabs/fill/bias'
import { codeOf as fill } from '../src/tabs/fill/code'
import { classifyCode, completeCode } from '../src/tabs/images/code'
import { codeOf as steps } from '../src/tabs/steps/code'

// A model that was served by another name than heedful.load finds it by: a file, an alias, a run.
const model = {
  id: 'mine',
  source: 'runs/mine-1',
  kind: 'encoder-decoder',
  n_heads: 4,
  image: { size: 2, channels: 1, levels: 256 },
} as Model
const seen = (view: string, more: Partial<Seen> = {}): Seen => ({
  ...{ model, text: 'Ein Hund.', target: '', view, which: 'cross', layer: 1 },
  ...{ heads: [], head: 2, token: 0, masked: [], ...more },
})
const how = { max_tokens: 5, temperature: 0, n: 1 }
const image = [
  [0, 1],
  [0.5, 0],
]
const ALL: Record<string, () => Code> = {
  complete: () => complete(model, 'To be', how, false),
  chat: () => chat(model, [{ role: 'user', content: 'Hi' }], how),
  fill: () => fill({ model: 'mine', texts: ['a _', 'b _'], n: 30 }, [], 'runs/mine-1'),
  bias: () => biasCode({ model: 'mine', templates: ['[he|she] is'] }, 'runs/mine-1'),
  steps: () => steps({ model, text: 'To be', layer: 0, temperature: 1, topK: 0, topP: 1 }),
  classify: () => classifyCode(model, image),
  'complete an image': () => completeCode(model, { model: 'mine', image, n_given: 2, temperature: 1, seed: 3, n: 1 }),
  ...Object.fromEntries(['heads', 'model', 'neuron', 'matrix'].map((view) => [view, () => attention(seen(view))])),
}

describe('View code', () => {
  beforeEach(() => vi.stubGlobal('location', { origin: 'http://localhost:8000' }))
  afterEach(() => vi.unstubAllGlobals())

  it.each(Object.keys(ALL))('of %s loads what there is, and asks the server by the name that it has there', (name) => {
    const { python, shell, curl } = ALL[name]()
    expect(python).toContain('heedful.load("runs/mine-1"')
    expect(python).not.toContain('"mine"')
    expect(shell).toContain('runs/mine-1')
    expect(curl).toContain('"model":"mine"')
  })

  it('of an alignment says nothing of its kind, of which there is one', () => {
    for (const layer of [1, -1]) expect(attention(seen('matrix', { layer })).shell).not.toContain('--kind')
    expect(attention(seen('heads')).shell).toContain('--kind cross')
  })

  it('of an image writes it to a file first', () => {
    expect(classifyCode(model, image).shell).toBe(
      "printf '%s\\n' 'P2 2 2 255' '0 255' '128 0' > drawing.pgm\n" +
        'heedful classify --image drawing.pgm --model runs/mine-1',
    )
    expect(ALL['complete an image']().shell).toContain('heedful complete-image drawing.pgm -n 1 --keep 0.5')
  })
})
