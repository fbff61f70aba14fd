"""A script for the page that replaces /v1/completions by a stream which starts and never ends, until it is aborted."""

# A server that writes a few tokens of each of three answers, and then no more.
STUCK = """
const real = window.fetch
window.fetch = (address, options) => {
  if (!String(address).endsWith('/v1/completions')) return real(address, options)
  const line = (index, i) => 'data: ' + JSON.stringify({ choices: [{ index, text: ` w${index}${i}`, finish_reason: null,
    logprobs: { tokens: [` w${index}${i}`], token_logprobs: [-1], top_logprobs: [{}], text_offset: [4 * i] } }] })
    + '\\n\\n'
  const body = new ReadableStream({ start(controller) {
    for (let i = 0; i < 3; i++) for (let index = 0; index < JSON.parse(options.body).n; index++)
      controller.enqueue(new TextEncoder().encode(line(index, i)))
    options.signal.addEventListener('abort', () => controller.error(options.signal.reason))
  } })
  return Promise.resolve(new Response(body))
}
"""
