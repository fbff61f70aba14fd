import { beforeEach, describe, expect, it } from 'vitest'
import type { Model } from '../src/lib/api'
import { address, openLink as open, page, shownState } from '../src/lib/state.svelte'

const model = (id: string, kind: Model['kind'], abilities: string[], image = false) =>
  ({ id, kind, abilities, image: image ? { size: 8, channels: 1, levels: 256 } : null, parameters: 1e6 }) as Model
const MODELS = [
  model('shakespeare', 'decoder', ['generate', 'fill', 'capture']),
  model('books', 'decoder', ['generate', 'fill', 'capture']),
  model('reader', 'encoder', ['answer', 'capture']),
  model('digits', 'image-classifier', ['classify'], true),
]

beforeEach(() => {
  page.models = MODELS
  page.choices = []
  page.typed = page.linked = null
  page.tabId = 'write'
  page.coach = ''
})

describe('the chosen model', () => {
  it('comes back after tabs that it is not for, also when their models are chosen there', () => {
    page.chosen = 'books'
    page.visit('tasks')
    page.chosen = 'reader'
    page.visit('images')
    page.chosen = 'digits'
    page.visit('write')
    expect(page.model?.id).toBe('books')
  })
  it('comes back after the address of such a tab was read again', () => {
    page.chosen = 'books'
    open('#/images?model=digits')
    page.visit('write')
    expect(page.model?.id).toBe('books')
  })
  it('that a link asks for and that is not served is told, and stays in the address', () => {
    open('#/write?model=nowhere&text=To%20be')
    expect([page.model?.id, page.missing]).toEqual(['shakespeare', 'nowhere'])
    expect(address()).toBe('#/write?model=nowhere&text=To%20be')
    page.chosen = 'books'
    expect([page.missing, address()]).toEqual([null, '#/write?model=books&text=To%20be'])
    open('#/write?model=reader') // served, and not for this
    expect(page.missing).toBe('reader')
    page.visit('complete')
    expect(page.missing).toBe(null)
  })
})

describe('the coach', () => {
  it('stays while its steps open places, and is part of the address', () => {
    page.coach = '# A\n\nb'
    page.coachStep = 2
    open('#/write?model=books&text=x')
    expect(address()).toBe('#/write?model=books&text=x&coach=%23%20A%0A%0Ab&coach_step=3')
    open(address() + '&coach=words&coach_step=1')
    expect([page.coach, page.coachStep]).toEqual(['words', 0])
  })
  it('sees what is on the screen', () => {
    open('#/write?model=books&text=x')
    expect(shownState()).toMatchObject({ tab: 'write', model: 'books', text: 'x' })
  })
})
