// A coach script: a title and steps, written as one Markdown text that anyone can edit.
//
//     # Where did street come from?
//
//     Point at a word of the translation.
//
//     ---
//     open: #/tasks?task=translate&text=Ein%20Hund
//     until: beams = 1
//     until: text contains Katze | Maus
//
//     Now take **one** beam.
//
// A line of --- ends a step. A step may begin with `open:`, the end of an address that is gone to when the step begins,
// and with `until:`, what must be true of the page's state for the step to be done. Several must all be true.

export interface Condition {
  name: string
  is: '=' | '!=' | '<' | '>' | 'contains' | 'is set' | 'changes'
  values: string[]
}
export interface Step {
  text: string
  open: string | null
  until: Condition[]
}
export interface Script {
  title: string
  steps: Step[]
  /** What could not be understood, for whoever writes it. */
  problems: string[]
}
/** The page's state, as an address would have it, with the defaults. */
export type State = Record<string, string>

export function parse(source: string): Script {
  const found: Script = { title: '', steps: [], problems: [] }
  const text = source.replace(/\r\n?/g, '\n').trim()
  const title = /^#\s+(.*)\n?/.exec(text)
  found.title = title?.[1].trim() ?? ''
  for (const part of text.slice(title?.[0].length ?? 0).split(/^-{3,}[ \t]*$/m)) {
    if (part.trim() !== '') found.steps.push(step(part, found.problems))
  }
  if (!found.title) found.problems.push('The first line is the title: # What this is about')
  if (!found.steps.length) found.problems.push('There are no steps yet: write a few lines, and --- between two steps.')
  return found
}

function step(part: string, problems: string[]): Step {
  const lines = part.trim().split('\n')
  const found: Step = { text: '', open: null, until: [] }
  for (let line = DIRECTIVE.exec(lines[0] ?? ''); line; line = DIRECTIVE.exec(lines[0] ?? '')) {
    lines.shift()
    const value = line[2].trim()
    if (line[1] === 'until') {
      const until = condition(value)
      if (until) found.until.push(until)
      else problems.push(`Not understood: until: ${value}`)
    } else if (value.startsWith('#/')) found.open = value
    else problems.push(`An address begins with #/: open: ${value}`)
  }
  found.text = lines.join('\n').trim()
  return found
}

const DIRECTIVE = /^(open|until):(.*)$/
const CONDITION = /^(\w+)\s*(!=|=|<|>|contains\b|is set\b|changes\b)\s*(.*)$/

function condition(text: string): Condition | null {
  const found = CONDITION.exec(text)
  if (!found) return null
  const [, name, is, rest] = found
  const values = rest === '' ? [] : rest.split('|').map((value) => value.trim())
  const alone = is === 'is set' || is === 'changes'
  if (alone ? values.length : !values.length) return null
  return { name, is: is as Condition['is'], values }
}

/** Whether a condition is true of a state; `before` is the state when the step began. */
export function holds({ name, is, values }: Condition, now: State, before: State): boolean {
  const value = now[name] ?? ''
  switch (is) {
    case '=':
      return values.includes(value)
    case '!=':
      return !values.includes(value)
    case '<':
      return value !== '' && Number(value) < Number(values[0])
    case '>':
      return value !== '' && Number(value) > Number(values[0])
    case 'contains':
      return values.some((part) => value.toLowerCase().includes(part.toLowerCase()))
    case 'is set':
      return !['', '[]', 'false', '-1'].includes(value)
    case 'changes':
      return value !== (before[name] ?? '')
  }
}

/** Whether a step is done; one without a condition never is, by itself. */
export const done = (step: Step, now: State, before: State): boolean =>
  step.until.length > 0 && step.until.every((one) => holds(one, now, before))

/** What happens during a step: whether it was done, and not only found so. */
export class Watch {
  #before: State | null = null // to which `changes` compares
  #last: State = {}
  #was = true

  constructor(readonly step: Step) {}

  /** The page's state is now this; whether that has made the step done. */
  sees(now: State): boolean {
    const moved = now.tab !== this.#last.tab || now.model !== this.#last.model
    // The settings of a tab that has just been loaded are told.
    const told = Object.keys(now).some((name) => !(name in this.#last))
    // Another tab and another model come with settings and a text of their own, which nobody has changed.
    if (this.#before && moved)
      this.#before = { ...now, ...Object.fromEntries(CHOSEN.map((name) => [name, this.#before?.[name] ?? ''])) }
    else this.#before = { ...now, ...this.#before }
    const is = done(this.step, now, this.#before)
    const made = is && !this.#was && (moved || !told)
    this.#was = is
    this.#last = now
    return made
  }
}
const CHOSEN = ['tab', 'model', 'kind']

/** Whether an address names a script that ships, or has the text of one. */
export const isName = (coach: string): boolean => /^[\w-]+$/.test(coach)
