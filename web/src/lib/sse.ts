// Server-sent events, as far as the API uses them: `data: ...` and an empty line.

/** The data of each event, however the bytes are cut into chunks. Leaving the loop cancels the stream. */
export async function* events(body: ReadableStream<Uint8Array>): AsyncGenerator<string> {
  const reader = body.getReader()
  const decoder = new TextDecoder()
  let rest = ''
  try {
    for (;;) {
      const { done, value } = await reader.read()
      rest += decoder.decode(value, { stream: !done })
      const parts = rest.split(/\r?\n\r?\n/)
      rest = parts.pop()!
      for (const part of parts) {
        const lines = part.split(/\r?\n/).filter((line) => line.startsWith('data:'))
        if (lines.length) yield lines.map((line) => line.slice(5).replace(/^ /, '')).join('\n')
      }
      if (done) return
    }
  } finally {
    await reader.cancel().catch(() => {})
  }
}
