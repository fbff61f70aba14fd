// Texts that begin alike, as a tree: each branch holds the text from where it parts from the others. What is on the
// screen is the way from the root to one of them.

import type { Piece } from './pieces'

let made = 0

export class Branch {
  readonly id = made++
  text = $state('')
  /** The tokens it was written in, if a model wrote it. */
  pieces = $state.raw<Piece[] | null>(null)
  /** The probability of one of them on average, where a link tells no more. */
  chance = $state.raw<number | null>(null)
  children = $state.raw<Branch[]>([])
  parent = $state.raw<Branch | null>(null)

  /** `by`: the model that wrote it; null: a person. */
  constructor(
    parent: Branch | null,
    readonly by: string | null,
    text = '',
    pieces: Piece[] | null = null,
  ) {
    this.parent = parent
    this.text = text
    this.pieces = pieces
  }
}

export class Tree {
  root = $state.raw(new Branch(null, null))
  current = $state.raw(this.root)

  /** From the first branch to this one; the root, which is empty, is left out. */
  path(branch: Branch): Branch[] {
    const found: Branch[] = []
    for (let at: Branch | null = branch; at?.parent; at = at.parent) found.unshift(at)
    return found
  }

  textOf(branch: Branch): string {
    return this.path(branch)
      .map((part) => part.text)
      .join('')
  }

  /** All branches from the top on. Those of one way stand below each other; where ways part they stand deeper. */
  get rows(): { branch: Branch; depth: number }[] {
    const found: { branch: Branch; depth: number }[] = []
    const visit = (branches: Branch[], depth: number): void => {
      for (const branch of branches) {
        found.push({ branch, depth })
        visit(branch.children, depth + (branch.children.length > 1 ? 1 : 0))
      }
    }
    visit(this.root.children, 0)
    return found
  }

  get leaves(): Branch[] {
    return this.rows.map((row) => row.branch).filter((branch) => !branch.children.length)
  }

  grow(from: Branch, by: string | null, text = '', pieces: Piece[] | null = null): Branch {
    const child = new Branch(from, by, text, pieces)
    from.children = [...from.children, child]
    return child
  }

  /** Cut a branch in two, if it must be; the branch that ends there. The lower part stays the same object. */
  split(branch: Branch, at: number): Branch {
    if (at >= branch.text.length) return branch
    if (at <= 0) return branch.parent ?? branch
    const [above, below] = halves(branch.pieces, at)
    const upper = new Branch(branch.parent, branch.by, branch.text.slice(0, at), above)
    upper.children = [branch]
    branch.parent!.children = branch.parent!.children.map((child) => (child === branch ? upper : child))
    branch.parent = upper
    branch.text = branch.text.slice(at)
    branch.pieces = below
    branch.chance = null
    return upper
  }

  /** The branch on the way to this one that ends so many characters into the text. */
  splitAt(branch: Branch, offset: number): Branch {
    let before = 0
    for (const part of this.path(branch)) {
      if (offset <= before + part.text.length)
        return offset === before ? part.parent! : this.split(part, offset - before)
      before += part.text.length
    }
    return branch
  }

  /** The branch that ends where this text does; made, beside the one it shares most with, if there is none. */
  place(text: string): Branch {
    if (this.textOf(this.current) === text) return this.current
    const way = new Set(this.path(this.current))
    let [at, rest] = [this.root, text]
    while (rest !== '') {
      const shared = at.children.map((child) => ({ child, n: common(child.text, rest) }))
      const best = shared.sort((a, b) => b.n - a.n || Number(way.has(b.child)) - Number(way.has(a.child)))[0]
      if (!best || best.n === 0) break
      const { child, n } = best
      if (n === rest.length) return this.split(child, n)
      // Two texts part between words, not because two words begin with the same letter.
      const whole = n === child.text.length
      const parted = whole ? n : child.text.slice(0, n).search(/\S*$/)
      if (parted === 0) break
      at = this.split(child, parted)
      rest = rest.slice(parted)
      if (!whole) break
    }
    if (rest === '') return at
    if (at.parent && at.by === null && !at.children.length) {
      at.text += rest // typed on
      return at
    }
    return this.grow(at, null, rest)
  }

  /** Take a branch away with all that grew on it. */
  remove(branch: Branch): void {
    const { parent } = branch
    if (!parent) return
    if (this.path(this.current).includes(branch)) this.current = parent
    parent.children = parent.children.filter((child) => child !== branch)
  }

  clear(): void {
    this.root = new Branch(null, null)
    this.current = this.root
  }
}

function common(one: string, other: string): number {
  let n = 0
  while (n < one.length && n < other.length && one[n] === other[n]) n++
  return n
}

/** Pieces before and behind a place in their text; none are known where it lies inside of one. */
function halves(pieces: Piece[] | null, at: number): [Piece[] | null, Piece[] | null] {
  let [n, length] = [0, 0]
  for (; pieces && n < pieces.length && length < at; n++) length += pieces[n].text.length
  return pieces && length === at ? [pieces.slice(0, n), pieces.slice(n)] : [null, null]
}
