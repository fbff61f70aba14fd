// "View code": the same thing in Python, on the command line and with curl. Whatever was typed is quoted, so that what
// is pasted into a shell or an interpreter does just what was seen.

import type { Model } from './api'

/** A served model: its name here, and what heedful.load finds it by. */
export type Named = Pick<Model, 'id' | 'source'>

export interface Code {
  python?: string
  shell?: string
  curl?: string
}

/** A Python literal: of a text, a number, a boolean, a list, a dictionary or None. */
export function py(value: unknown): string {
  if (value === null || value === undefined) return 'None'
  if (typeof value === 'boolean') return value ? 'True' : 'False'
  if (typeof value === 'number') return String(value)
  if (Array.isArray(value)) return `[${value.map(py).join(', ')}]`
  if (typeof value === 'object')
    return `{${Object.entries(value)
      .map(([k, v]) => `${py(k)}: ${py(v)}`)
      .join(', ')}}`
  return '"' + [...String(value)].map(escaped).join('') + '"'
}

function escaped(character: string): string {
  if (character === '"' || character === '\\') return '\\' + character
  if (character === '\n') return '\\n'
  if (character === '\t') return '\\t'
  const code = character.codePointAt(0)!
  // Control characters, lone surrogates and those that turn the writing direction would not show as they are.
  const hidden =
    code < 32 || (code >= 127 && code < 160) || (code >= 0x200b && code <= 0x200f) || (code >= 0x2028 && code <= 0x202e)
  if (hidden || (code >= 0x2066 && code <= 0x2069) || (code >= 0xd800 && code <= 0xdfff) || code === 0xfeff)
    return '\\u' + code.toString(16).padStart(4, '0')
  return character
}

/** A word of a POSIX shell. */
export function sh(text: string | number): string {
  const word = String(text)
  return /^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'\\''`)}'`
}

/** f(a=1, b="x") with the arguments that are set. */
export function call(name: string, positional: unknown[], named: Record<string, unknown> = {}): string {
  const rest = Object.entries(named).filter(([, value]) => value !== undefined)
  return `${name}(${[...positional.map(py), ...rest.map(([key, value]) => `${key}=${py(value)}`)].join(', ')})`
}

/** `heedful COMMAND words --option value`; false and undefined options are left out, true ones have no value. */
export function heedful(
  command: string,
  words: (string | number)[],
  options: Record<string, string | number | boolean | undefined> = {},
): string {
  const given = Object.entries(options).filter(([, value]) => value !== undefined && value !== false)
  const flags = given.map(([key, value]) => ` --${key}${value === true ? '' : ' ' + sh(value as string | number)}`)
  return ['heedful', command, ...words.map(sh)].join(' ') + flags.join('')
}

/** The request to this server. */
export function curl(path: string, body?: unknown, origin = location.origin, key = false): string {
  const lines = [`curl ${sh(origin + path)}`]
  if (key) lines.push('-H "Authorization: Bearer $HEEDFUL_API_KEY"')
  if (body !== undefined) lines.push("-H 'Content-Type: application/json'", `-d ${sh(JSON.stringify(body))}`)
  return lines.join(' \\\n  ')
}
