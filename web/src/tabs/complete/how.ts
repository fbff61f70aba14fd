// The settings of an answer, as the address has them and as the server, Python and the command line want them.

import { visible } from '../../lib/format'
import { call, curl, heedful, sh, type Code, type Named } from '../../lib/code'
import { readAs } from '../write/prompt'
import type { How } from './session.svelte'

export const USUAL = {
  temperature: 0.8,
  length: 100,
  stop: [] as string[],
  top_p: 1,
  top_k: 0,
  frequency: 0,
  presence: 0,
  n: 1,
  seed: '',
  probabilities: false,
  tree: '', // see link.ts
}
export type Own = typeof USUAL

/** The most tokens that are asked for at once, of a model with this context. */
export const longest = (context: number | null): number => Math.max(1, Math.min(1000, (context ?? 1001) - 1))

const within = (value: number, low: number, high: number): number => Math.min(Math.max(value, low), high)

/** Whether this is a seed: a whole number; nothing means by chance. */
export const isSeed = (text: string): boolean => /^\d{0,15}$/.test(text.trim())

/** What is asked of the server; an address may hold anything, so all is brought within its limits. */
export function howOf(own: Own, context: number | null): How {
  const seed = own.seed.trim()
  const whole: How = {
    max_tokens: within(Math.round(own.length), 1, longest(context)),
    temperature: within(own.temperature, 0, 2),
    n: within(Math.round(own.n), 1, 8),
  }
  if (own.top_p < 1) whole.top_p = within(own.top_p, 0.01, 1)
  if (own.top_k >= 1) whole.top_k = Math.round(own.top_k)
  if (own.frequency) whole.frequency_penalty = within(own.frequency, -2, 2)
  if (own.presence) whole.presence_penalty = within(own.presence, -2, 2)
  if (own.stop.length) whole.stop = own.stop.filter((text) => text !== '').slice(0, 4)
  if (seed !== '' && isSeed(seed)) whole.seed = Number(seed)
  return whole
}

/** Why a model wrote nothing: its own end of the text, or a stop sequence, before which nothing is left. */
export function nothingCame(model: string, stop: string[]): string {
  if (!stop.length) return `For ${model} the text ends here.`
  const names = stop.map((text) => `“${visible(text)}”`).join(' or ')
  return `${model} wrote nothing before the stop sequence ${names}. Take it away, or try again at a higher temperature.`
}

/** The same answer elsewhere. */
export function codeOf(model: Named, prompt: string, how: How, probabilities: boolean, rendered = false): Code {
  const { n, ...rest } = how
  const scored = probabilities ? { logprobs: 5, echo: true } : {}
  const named = { ...rest, ...(n > 1 ? { n } : {}), ...scored, ...readAs(rendered) }
  const { stop, max_tokens, temperature, top_p, top_k, frequency_penalty, presence_penalty, seed } = how
  const flags = {
    'max-tokens': max_tokens,
    temperature,
    'top-p': top_p,
    'top-k': top_k,
    'frequency-penalty': frequency_penalty,
    'presence-penalty': presence_penalty,
    seed,
    n: n > 1 ? n : undefined,
    logprobs: probabilities ? 5 : undefined,
    echo: probabilities,
    'allow-special': rendered,
    json: probabilities,
  }
  const stops = (stop ?? []).map((text) => ` --stop ${sh(text)}`).join('')
  return {
    python: pythonOf(model.source, prompt, named, n > 1, probabilities),
    shell: heedful('generate', [model.source, prompt], flags) + stops,
    curl: curl('/v1/completions', { model: model.id, prompt, ...named }),
  }
}

function pythonOf(
  model: string,
  prompt: string,
  named: Record<string, unknown>,
  several: boolean,
  probabilities: boolean,
): string {
  const load = `model = ${call('heedful.load', [model])}`
  if (!several && !probabilities)
    return `import heedful\n\n${load}\nfor piece in ${call('model.stream', [prompt], named)}:\n    print(piece, end="", flush=True)`
  const lines = [
    'import heedful',
    '',
    load,
    `[result] = ${call('model.complete', [prompt], named)}`,
    'for choice in result.choices:',
    '    print(choice.text)',
  ]
  if (!probabilities) return lines.join('\n')
  return [
    'import math',
    '',
    ...lines,
    '    for score in choice.scores:',
    '        likely = {model.tokenizer.decode([id]): f"{math.exp(logprob):.1%}" for id, logprob in score.top}',
    '        print(repr(model.tokenizer.decode([score.token])), f"{math.exp(score.logprob):.1%}", likely)',
  ].join('\n')
}
