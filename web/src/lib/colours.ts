// Colours of numbers: one ramp from the paper to the accent, one from blue over the paper to orange, and hues to tell
// heads, labels and branches apart. Lightness follows the theme, so that text on or beside them stays readable.

type Stop = [number, number, number]

const RAMPS: Record<'light' | 'dark', Record<'sequential' | 'diverging', Stop[]>> = {
  light: {
    sequential: [
      [250, 248, 245],
      [253, 220, 184],
      [245, 163, 98],
      [214, 96, 30],
      [150, 45, 5],
      [84, 22, 4],
    ],
    diverging: [
      [24, 66, 130],
      [70, 126, 190],
      [166, 200, 228],
      [248, 246, 243],
      [248, 196, 148],
      [217, 108, 41],
      [143, 45, 6],
    ],
  },
  dark: {
    sequential: [
      [28, 26, 25],
      [74, 36, 18],
      [140, 58, 18],
      [214, 99, 32],
      [255, 165, 92],
      [255, 233, 200],
    ],
    diverging: [
      [150, 205, 255],
      [72, 140, 214],
      [34, 70, 118],
      [34, 32, 31],
      [112, 52, 20],
      [214, 106, 40],
      [255, 190, 130],
    ],
  },
}

function along(stops: Stop[], t: number): Stop {
  const place = Math.min(Math.max(t, 0), 1) * (stops.length - 1)
  const i = Math.min(Math.floor(place), stops.length - 2)
  return stops[i].map((low, c) => Math.round(low + (stops[i + 1][c] - low) * (place - i))) as Stop
}

export type Scale = 'sequential' | 'diverging'

/** 256 colours, as the four bytes of each pixel. */
export function table(scale: Scale, dark: boolean): Uint8ClampedArray {
  const found = new Uint8ClampedArray(1024)
  for (let i = 0; i < 256; i++) found.set([...along(RAMPS[dark ? 'dark' : 'light'][scale], i / 255), 255], 4 * i)
  return found
}

/** The colour of t in 0..1, or of -1..1 when diverging. */
export function tint(t: number, dark: boolean, scale: Scale = 'sequential'): string {
  const [r, g, b] = along(RAMPS[dark ? 'dark' : 'light'][scale], scale === 'diverging' ? (t + 1) / 2 : t)
  return `rgb(${r} ${g} ${b})`
}

/** Black or white, whichever reads better on that colour. */
export function ink(t: number, dark: boolean, scale: Scale = 'sequential'): string {
  const [r, g, b] = along(RAMPS[dark ? 'dark' : 'light'][scale], scale === 'diverging' ? (t + 1) / 2 : t).map((x) => {
    const s = x / 255
    return s <= 0.04045 ? s / 12.92 : ((s + 0.055) / 1.055) ** 2.4
  })
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? '#000000' : '#ffffff' // where both have 4.6:1
}

/** The i-th of n colours that are told apart, equally light: of heads, labels, branches. */
export function hue(i: number, n: number, dark: boolean): string {
  const angle = (45 + (360 * i) / Math.max(n, 1)) % 360
  return dark ? `oklch(0.76 0.13 ${angle})` : `oklch(0.58 0.14 ${angle})`
}
