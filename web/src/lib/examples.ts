// Texts to begin with, until something is typed: what a model knows how to read.

import type { Model } from './api'

const KNOWN: Record<string, string[]> = {
  shakespeare: ['To be, or not to be', 'KING RICHARD:\nMy lord, ', 'What light through yonder window'],
  books: ['The old house stood at the end of the lane,', '"I do not believe you," said Mary,'],
  tiny: ['To be, or not', 'My lord'],
  'tiny-books': ['The old man opened the door and looked', 'She was the most beautiful'],
  'bert-books': [
    'The ship sailed across the sea to a distant island.',
    'She opened the door and looked into the garden.',
  ],
  translator: [
    'Ein Hund läuft über die Straße.',
    'Eine Frau in einem roten Kleid liest ein Buch.',
    'Two children are playing in the garden.',
    'Where did you buy that?',
  ],
  't5-tasks': [
    'translate German to English: Zwei Hunde laufen am Strand.',
    'sentiment: The plot is dull and the actors look bored.',
    'question: Where is Anna waiting? context: Anna is waiting at the train station. Peter is buying a newspaper.',
    'correct: He was vrey tired and went to sleep.',
  ],
  reader: [
    'The Amazon is a river in South America. It is about 6,400 kilometres long and carries more water than any other river in the world. Its source lies in the Andes of Peru, and it flows into the Atlantic Ocean in Brazil.',
  ],
  sentiment: ['A warm, funny and wise film that one is sorry to see end.', 'The plot is dull and the jokes are worse.'],
  entities: ['Marie Curie left Warsaw for Paris in 1891.'],
  languages: ['Le chien traverse la rue en courant.', 'Der Hund läuft über die Straße.'],
  sums: ['12+34=', '45+54='],
  reversal: ['3 1 4 1 5 9 2 6 5 3 5 8 9 7 9 3 2 3 8 4'],
}

/** Texts without a token that is unknown to the model. */
export function examples(model: Model | null): string[] {
  if (!model || model.image) return ['']
  return KNOWN[model.id] ?? [model.example]
}

/** Whether a model reads words, and not only numbers or other symbols. */
export const readsWords = (model: Model): boolean => /\p{L}{2}/u.test(examples(model)[0])
