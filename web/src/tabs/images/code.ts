// "View code" of this tab.

import type { Model } from '../../lib/api'
import { call, curl, heedful, py, sh, type Code } from '../../lib/code'
import type { Levels } from './levels'
import type { Wish } from './completing.svelte'

const short = (image: Levels): Levels => image.map((row) => row.map((level) => Number(level.toFixed(4))))

function pixels(image: Levels): string {
  return `image = torch.tensor([\n${short(image)
    .map((row) => `    ${py(row)},`)
    .join('\n')}\n])`
}

const FILE = 'drawing.pgm'

/** A command after the image was written to its file: a plain one, of numbers. */
function file(image: Levels, command: string): string {
  const rows = image.map((row) => row.map((level) => Math.round(255 * level)).join(' '))
  return `printf '%s\\n' 'P2 ${image[0].length} ${image.length} 255' ${rows.map(sh).join(' ')} > ${FILE}\n${command}`
}

export function classifyCode(model: Model, image: Levels): Code {
  const channels = model.image!.channels
  const python = [
    'import torch',
    '',
    'import heedful',
    '',
    pixels(image),
    `pixels = (image * 2 - 1)${channels === 1 ? '[None]' : `.expand(${channels}, -1, -1)`}  # (channels, height, width)`,
    `for label in ${call('heedful.load', [model.source])}.classify(pixels):`,
    '    print(label.name, label.score)',
  ].join('\n')
  const shell = file(image, heedful('classify', [], { image: FILE, model: model.source }))
  return { python, shell, curl: curl('/api/image/classify', { model: model.id, image: short(image) }) }
}

export function completeCode(model: Model, wish: Wish): Code {
  const python = [
    'import torch',
    '',
    'import heedful',
    '',
    pixels(wish.image),
    `begun = (image.flatten()[:${wish.n_given}] * ${model.image!.levels - 1}).round().long()  # as the model counts levels`,
    `model = ${call('heedful.load', [model.source])}`,
    `images = model.complete_image(begun, ${call('', [wish.n], { temperature: wish.temperature, seed: wish.seed }).slice(1, -1)})`,
    `print(images.unflatten(1, (${wish.image.length}, ${wish.image.length})))`,
  ].join('\n')
  const { n, temperature, seed } = wish
  const keep = Number((wish.n_given / wish.image.length ** 2).toFixed(4))
  const options = { keep, temperature, seed, model: model.source, out: 'completed.png' }
  const shell = file(wish.image, heedful('complete-image', [FILE, '-n', n], options))
  return { python, shell, curl: curl('/api/image/complete', { ...wish, image: short(wish.image) }) }
}
