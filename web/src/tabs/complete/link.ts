// The tree of branches as a text for the address, so that a link reopens it: which model wrote what, from where on, and
// how likely it was. A tree that is too large leaves the way to the branch that is shown.

import { perToken } from './pieces'
import type { Branch, Tree } from './tree.svelte'

const LONGEST = 8000 // characters in an address: more than that is cut or refused on its way through mails and chats

/** Who wrote: the number of a model in the list before, from 1 on; 0 is a person. */
type Entry = [parent: number, by: number, text: string, chance?: number]

function encoded(branches: Branch[], current: Branch): string {
  const models = [...new Set(branches.flatMap(({ by }) => (by === null ? [] : [by])))]
  const entries = branches.map((branch): Entry => {
    const chance = perToken(branch.pieces) ?? branch.chance
    const [parent, by] = [branches.indexOf(branch.parent!), branch.by === null ? 0 : 1 + models.indexOf(branch.by)]
    return chance === null ? [parent, by, branch.text] : [parent, by, branch.text, Math.round(1e4 * chance)]
  })
  return JSON.stringify([branches.indexOf(current), models, ...entries])
}

/** What a link says of a tree, and whether it is all of it. Of a tree with no written answer it has the text alone. */
export function told(tree: Tree): { text: string; whole: boolean } {
  const all = tree.rows.map(({ branch }) => branch)
  if (all.every(({ by }) => by === null)) return { text: '', whole: true }
  const fits = (text: string) => encodeURIComponent(text).length <= LONGEST
  const whole = encoded(all, tree.current)
  if (fits(whole)) return { text: whole, whole: true }
  const way = encoded(tree.path(tree.current), tree.current)
  return { text: fits(way) ? way : '', whole: false }
}

/** Make the tree anew as a link says; of what makes no sense, none. */
export function restore(tree: Tree, text: string): void {
  tree.clear()
  try {
    const [current, models, ...entries] = JSON.parse(text || '[-1, []]') as [number, string[], ...Entry[]]
    const made: Branch[] = []
    for (const [parent, by, part, chance] of entries) {
      const from = parent === -1 ? tree.root : made[parent]
      if (typeof part !== 'string' || part === '' || !from || (by !== 0 && typeof models[by - 1] !== 'string'))
        throw new SyntaxError('not a branch')
      const branch = tree.grow(from, by === 0 ? null : models[by - 1], part)
      if (typeof chance === 'number') branch.chance = chance / 1e4
      made.push(branch)
    }
    tree.current = made[current] ?? tree.root
  } catch {
    tree.clear()
  }
}
