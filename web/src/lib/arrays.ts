// Arrays as they travel: not in the JSON but after it, so that they are used where they arrived, without a copy.

export interface Numbers {
  shape: number[]
  data: Float32Array
}
/** Of small pictures: 255 is 1. */
export interface Bytes {
  shape: number[]
  data: Uint8Array
}

/** A response as it is used: the arrays of the schema, base64 in JSON, are typed arrays. */
export type Decoded<T> = T extends { dtype: 'float32' }
  ? Numbers
  : T extends { dtype: 'uint8' }
    ? Bytes
    : T extends (infer Item)[]
      ? Decoded<Item>[]
      : T extends object
        ? { [Key in keyof T]: Decoded<T[Key]> }
        : T

/** What the server calls such a reply; it sends plain JSON to those who do not ask for it. */
export const ARRAYS = 'application/vnd.heedful.arrays'
const KINDS = { float32: Float32Array, uint8: Uint8Array } // little-endian, as are all machines with a browser

/**
 * A reply: the length of its JSON in 4 bytes, the JSON, and the arrays. In the JSON an array is
 * {"shape": [2, 3], "dtype": "float32", "at": where it begins, in bytes after the JSON}.
 */
export function unpack(reply: ArrayBuffer): unknown {
  const length = new DataView(reply).getUint32(0, true)
  // eslint-disable-next-line @typescript-eslint/no-explicit-any -- any JSON
  const place = (value: any): unknown => {
    if (value === null || typeof value !== 'object') return value
    if (value.at !== undefined && value.dtype in KINDS) {
      const size = value.shape.reduce((a: number, b: number) => a * b, 1)
      return {
        shape: value.shape,
        data: new KINDS[value.dtype as keyof typeof KINDS](reply, 4 + length + value.at, size),
      }
    }
    for (const key in value) if (typeof value[key] === 'object') value[key] = place(value[key])
    return value
  }
  return place(JSON.parse(new TextDecoder().decode(new Uint8Array(reply, 4, length))))
}

/** One part of an array along its leading axes, without copying: slice(weights, layer, head) is a matrix. */
export function slice(array: Numbers, ...index: number[]): Numbers {
  const shape = array.shape.slice(index.length)
  const size = shape.reduce((a, b) => a * b, 1)
  let place = 0
  index.forEach((number, axis) => {
    if (!(number >= 0 && number < array.shape[axis]))
      throw new RangeError(`index ${number} of axis ${axis} of ${array.shape}`)
    place = place * array.shape[axis] + number
  })
  return { shape, data: array.data.subarray(place * size, (place + 1) * size) }
}

/** The mean over the first axis, as of the heads of a layer. */
export function mean(array: Numbers): Numbers {
  const [n, ...shape] = array.shape
  const size = array.data.length / n
  const data = new Float32Array(size)
  for (let i = 0; i < array.data.length; i++) data[i % size] += array.data[i] / n
  return { shape, data }
}

export function transpose(array: Numbers): Numbers {
  const [rows, columns] = array.shape
  const data = new Float32Array(rows * columns)
  for (let r = 0; r < rows; r++) for (let c = 0; c < columns; c++) data[c * rows + r] = array.data[r * columns + c]
  return { shape: [columns, rows], data }
}

export function softmax(logits: ArrayLike<number>, temperature = 1): Float32Array {
  let most = -Infinity
  for (let i = 0; i < logits.length; i++) most = Math.max(most, logits[i])
  const found = Float32Array.from(logits, (x) => Math.exp((x - most) / temperature))
  let sum = 0
  for (const x of found) sum += x
  return found.map((x) => x / sum)
}
