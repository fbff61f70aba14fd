import { describe, expect, it } from 'vitest'
import type { Model } from '../src/lib/api'
import { byPurpose } from '../src/lib/purposes'
import { parseHash } from '../src/lib/url'
import { cards, linkOf, tooLarge } from '../src/tabs/start/cards'

const model = (id: string, kind: Model['kind'], purpose: Model['purpose'], more: Partial<Model> = {}) =>
  ({ id, kind, purpose, about: '', abilities: [], image: null, labels: null, n_heads: 2, ...more }) as unknown as Model
const small = { parameters: 1e6, context: 256 }
const MODELS = [
  model('big', 'decoder', 'chat', { parameters: 1e9, context: 4096 }),
  model('play', 'decoder', 'write', small),
  model('blanks', 'encoder', 'fill', small),
  model('tasks', 'encoder-decoder', 'translate', { ...small, about: 'spells and counts' }),
  model('german', 'encoder-decoder', 'translate', { ...small, about: 'translates German' }),
  model('turn', 'recurrent', 'translate', small),
  model('clothes', 'image-classifier', 'classify_image', { ...small, labels: ['coat', 'shirt'] }),
  model('digits', 'image-classifier', 'classify_image', {
    ...small,
    labels: ['0', '7'],
    image: { size: 8, channels: 1, levels: 256 },
  }),
]

describe('the cards of Start', () => {
  it('choose a served model by what it is for, whatever its name', () => {
    expect(cards.map((card) => card.model(MODELS)?.id)).toEqual(['blanks', 'turn', 'digits', 'german', 'play', 'play'])
    expect(cards.map((card) => card.model([])?.id)).toEqual(cards.map(() => undefined))
  })
  it('lead to their tab with the coach of their name', () => {
    for (const card of cards) {
      const { tab, params } = parseHash(linkOf(card, card.model(MODELS)!))
      expect([tab, params.coach]).toEqual([card.tab, card.id])
    }
  })
  it('load no large model only to be decorated', () => {
    expect(MODELS.filter(tooLarge).map(({ id }) => id)).toEqual(['big'])
    expect(tooLarge({ ...MODELS[0], loaded: true })).toBe(false)
  })
})

describe('models', () => {
  it('are grouped by what they are for', () => {
    expect(byPurpose(MODELS).map(({ label, models }) => [label, models.length])).toEqual([
      ['Write', 1],
      ['Chat', 1],
      ['Fill in words', 1],
      ['Translate and rewrite', 3],
      ['See images', 2],
    ])
  })
})
