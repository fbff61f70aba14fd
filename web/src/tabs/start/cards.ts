// The six things to try: which model each is for, what is computed for its miniature, and where it leads. The names of
// the cards are those of their coach's scripts (lib/coach/scripts).

import { api, type Model, type Token } from '../../lib/api'
import { examples, readsWords } from '../../lib/examples'
import { tabs } from '../../lib/tabs'
import { makeHash } from '../../lib/url'
import { resized, type Levels } from '../images/levels'
import { extended, empty, smoothed, thinned, type Point } from '../runs/log'

export interface Item {
  label: string
  value: number
}
/** What a card shows. */
export type Miniature =
  | { kind: 'blanks'; sentences: { before: string; after: string; words: Item[] }[] }
  | { kind: 'grid'; rows: string[]; columns: string[]; weights: number[] }
  | { kind: 'image'; image: Levels; labels: Item[] }
  | { kind: 'source'; target: { text: string; chosen: boolean }[]; source: Item[] }
  | { kind: 'next'; text: string; words: Item[] }
  | { kind: 'curve'; name: string; points: Point[] }
  | { kind: 'sample'; prompt: string; text: string }

export interface Card {
  id: string
  tab: string
  title: string
  about: string
  /** What to say where no served model is for it. */
  wants: string
  model: (models: Model[]) => Model | undefined
  /** What the address says besides the model and the coach. */
  params: (model: Model) => Record<string, string>
  compute: (model: Model, signal: AbortSignal) => Promise<Miniature>
}

const LARGE = 50e6 // parameters: a model like this is loaded when somebody asks for it, not to decorate a page
export const tooLarge = (model: Model): boolean => model.parameters > LARGE && !model.loaded

const SENTENCES = ['She drank a glass of _.', 'She drank a cup of _.']
const ROOM = 128 // tokens of context that a sample needs
const NUMBERS = '3 1 4 1 5 9 2 6'
const smallest = (models: Model[]): Model | undefined => [...models].sort((a, b) => a.parameters - b.parameters)[0]
const writers = (models: Model[]): Model[] => models.filter(({ kind, image }) => kind === 'decoder' && image === null)
const top = (items: Item[], n: number): Item[] => [...items].sort((a, b) => b.value - a.value).slice(0, n)

export const cards: Card[] = [
  {
    id: 'one-word',
    tab: 'fill',
    title: 'Change one word, change its mind',
    about: 'Hide a word and see what the model expects there. Then change another one.',
    wants: 'a masked language model, such as bert-books',
    model: (models) => models.find(({ purpose }) => purpose === 'fill'),
    params: () => ({ text: 'She drank a glass of wine.', blank: '2', first: SENTENCES[0], second: SENTENCES[1] }),
    async compute(model, signal) {
      const { words, logprobs } = await api.fill({ model: model.id, texts: SENTENCES, n: 5 }, signal)
      const sentences = SENTENCES.map((text, row) => {
        const [before, after] = text.split('_')
        const chances = words.map((label, i) => ({ label, value: Math.exp(logprobs.data[row * words.length + i]) }))
        return { before, after, words: top(chances, 3) }
      })
      return { kind: 'blanks', sentences }
    },
  },
  {
    id: 'backwards',
    tab: 'attention',
    title: 'It writes backwards',
    about: 'A model learned to turn numbers round. Its attention shows how: it looks from right to left.',
    wants: 'a recurrent model with attention, such as reversal',
    model: (models) => models.find(({ kind, n_heads }) => kind === 'recurrent' && n_heads > 0),
    params: () => ({ text: NUMBERS, view: 'matrix' }),
    async compute(model, signal) {
      const { source, target, weights } = await api.translate({ model: model.id, text: NUMBERS, beams: 1 }, signal)
      const plain = (tokens: Token[]) => tokens.flatMap(({ special }, i) => (special ? [] : [i]))
      const [rows, columns] = [plain(target), plain(source)]
      const weight = (row: number, column: number) => weights?.data[row * source.length + column] ?? 0
      return {
        kind: 'grid',
        rows: rows.map((i) => target[i].text.trim()),
        columns: columns.map((i) => source[i].text.trim()),
        weights: rows.flatMap((row) => columns.map((column) => weight(row, column))),
      }
    },
  },
  {
    id: 'draw-seven',
    tab: 'images',
    title: 'Draw a 7',
    about: 'Draw with the mouse or a finger, and watch the model make up its mind with every stroke.',
    wants: 'a model that reads digits, such as digits-vit',
    model: (models) => models.find(({ kind, labels }) => kind === 'image-classifier' && labels?.includes('7')),
    params: ({ image }) => ({ image: '0'.repeat(image!.size ** 2) }),
    async compute(model, signal) {
      const { mnist } = await api.images(signal)
      const seven = mnist.find(({ label }) => String(label) === '7') ?? mnist[0]
      const image = resized(seven.image, model.image!.size)
      const { labels } = await api.classifyImage({ model: model.id, image }, signal)
      const chances = labels.map(({ label, probability }) => ({ label, value: probability }))
      return { kind: 'image', image, labels: top(chances, 3) }
    },
  },
  {
    id: 'street',
    tab: 'tasks',
    title: 'Where did “street” come from?',
    about: 'A translation, and for each of its words the ones that the model looked at to write it.',
    wants: 'a model that translates, such as translator',
    model: (models) => {
      const able = models.filter(({ purpose, kind }) => purpose === 'translate' && kind === 'encoder-decoder')
      return able.find(({ about }) => /translat/i.test(about)) ?? able[0]
    },
    params: (model) => ({ task: 'translate', text: examples(model)[0] }),
    async compute(model, signal) {
      const { source, target, weights } = await api.translate({ model: model.id, text: examples(model)[0] }, signal)
      return sourceOf(source, target, weights?.data ?? new Float32Array())
    },
  },
  {
    id: 'inside',
    tab: 'steps',
    title: 'Inside one prediction',
    about: 'Every number between a text and its next token, and what each of them was computed from.',
    wants: 'a tiny decoder, such as tiny',
    model: (models) => writers(models).find(tabs.find(({ id }) => id === 'steps')!.first!) ?? smallest(writers(models)),
    params: (model) => ({ text: examples(model)[0] }),
    async compute(model, signal) {
      const text = examples(model)[0]
      const { next } = await api.next({ model: model.id, text, top_k: 4 }, signal)
      return {
        kind: 'next',
        text,
        words: next.map(({ token, probability }) => ({ label: token.text, value: probability })),
      }
    },
  },
  {
    id: 'train',
    tab: 'runs',
    title: 'Train your own in a minute',
    about: 'Choose a text, watch the loss fall, and let the new model write.',
    wants: 'a model', // any: it shows what one may come to
    model: (models) =>
      smallest(writers(models).filter((model) => readsWords(model) && (model.context ?? ROOM) >= ROOM)) ??
      smallest(writers(models)) ??
      models[0],
    params: () => ({}),
    async compute(model, signal) {
      const { runs } = await api.runs(signal)
      const newest = [...runs].sort((a, b) => b.updated - a.updated).find(({ step }) => (step ?? 0) > 1)
      if (newest) {
        const { steps, losses } = extended(empty(), (await api.run(newest.name, 0, -1, signal)).lines)
        const points = thinned(steps, smoothed(losses, 0.9), 60)
        if (points.length > 2) return { kind: 'curve', name: newest.name, points }
      }
      if (!writers([model]).length) throw new Error('no run, and no model that writes')
      const prompt = examples(model)[0]
      const max_tokens = Math.min(60, Math.floor((model.context ?? ROOM) / 2))
      const body = { model: model.id, prompt, max_tokens, temperature: 0.8, seed: 1 }
      return { kind: 'sample', prompt, text: (await api.complete(body, signal)).choices[0].text }
    },
  },
]

/** The words of the source that one word of a translation came from: that of the card's title, else the longest. */
function sourceOf(source: Token[], target: Token[], weights: Float32Array): Miniature {
  const long = ({ special, text }: Token): number => (special ? -1 : /street/i.test(text) ? 100 : text.trim().length)
  const chosen = target.reduce((best, token, i) => (long(token) > long(target[best]) ? i : best), 0)
  const row = weights.subarray(chosen * source.length, (chosen + 1) * source.length)
  return {
    kind: 'source',
    target: target.flatMap(({ special, text }, i) => (special ? [] : [{ text, chosen: i === chosen }])),
    source: source.flatMap(({ special, text }, i) => (special ? [] : [{ label: text, value: row[i] ?? 0 }])),
  }
}

/** Where a card leads: its tab, with the coach. */
export const linkOf = ({ id, tab, params }: Card, model: Model): string =>
  makeHash({ tab, params: { ...(tab === 'runs' ? {} : { model: model.id }), ...params(model), coach: id } })
