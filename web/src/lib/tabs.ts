// The tabs: what each is called, which models it is for, and where it is. Each is loaded when first opened.

import type { Component } from 'svelte'
import type { Model } from './api'
import { readsWords } from './examples'

export interface Tab {
  id: string
  label: string
  fits: (model: Model) => boolean
  first?: (model: Model) => boolean // those to begin with, where none is chosen
  alone?: true // it needs no model, and no text
  wants: string // what to say where no served model fits
  load: () => Promise<{ default: Component }>
}

const CHARACTERS = 384 // a vocabulary of bytes or characters is hardly larger

const can =
  (...abilities: string[]) =>
  (model: Model) =>
    model.image === null && abilities.some((a) => (model.abilities as string[]).includes(a))
/** Whether words are near each other in its vectors: a vocabulary of characters has none. */
export const comparesWords = (model: Model): boolean =>
  can('neighbours')(model) && (model.vocabulary ?? 0) > CHARACTERS && readsWords(model)
const writes = (model: Model) => can('generate')(model) && model.kind === 'decoder'
export const chats = (model: Model) => can('generate')(model) && model.chat

export const tabs: Tab[] = [
  {
    id: 'start',
    label: 'Start',
    fits: () => false,
    alone: true,
    wants: '',
    load: () => import('../tabs/Start.svelte'),
  },
  {
    id: 'learn',
    label: 'Learn',
    fits: () => false,
    alone: true,
    wants: '',
    load: () => import('../tabs/Learn.svelte'),
  },
  {
    id: 'write',
    label: 'Write',
    fits: writes,
    wants: 'a model that continues text, such as books',
    load: () => import('../tabs/Write.svelte'),
  },
  {
    id: 'complete',
    label: 'Complete',
    fits: writes,
    wants: 'a model that continues text, such as books',
    load: () => import('../tabs/Complete.svelte'),
  },
  {
    id: 'chat',
    label: 'Chat',
    fits: chats,
    wants: 'a model with a chat template, such as chat',
    load: () => import('../tabs/Chat.svelte'),
  },
  {
    id: 'fill',
    label: 'Fill in',
    fits: can('fill', 'classify'),
    first: (m) => m.kind === 'encoder' && can('fill')(m),
    wants: 'a masked or causal language model or a classifier, such as bert-books',
    load: () => import('../tabs/Fill.svelte'),
  },
  {
    id: 'attention',
    label: 'Attention',
    fits: (m) => can('capture')(m) && Object.keys(m.attention_layers).length > 0,
    first: (m) => m.kind === 'encoder' && can('fill')(m), // words, and not characters
    wants: 'a model of text, such as shakespeare',
    load: () => import('../tabs/Attention.svelte'),
  },
  {
    id: 'steps',
    label: 'Step by step',
    fits: writes,
    first: (m) => m.id === 'tiny-books', // whose every number is shown, and whose tokens are merged
    wants: 'a model that continues text, such as tiny-books',
    load: () => import('../tabs/Steps.svelte'),
  },
  {
    id: 'tasks',
    label: 'Tasks',
    fits: (m) => can('translate', 'classify', 'answer', 'tag')(m) || comparesWords(m),
    wants: 'a model that translates, classifies, answers or tags, such as translator',
    load: () => import('../tabs/Tasks.svelte'),
  },
  {
    id: 'images',
    label: 'Images',
    fits: (m) => m.image !== null,
    wants: 'a model of images, such as digits-vit or digits-gpt',
    load: () => import('../tabs/Images.svelte'),
  },
  {
    id: 'runs',
    label: 'Runs',
    fits: () => false,
    alone: true,
    wants: '',
    load: () => import('../tabs/Runs.svelte'),
  },
]
