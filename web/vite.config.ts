// The page is built into the Python package, which serves it. Scripts and styles are files of their own, because the
// server's Content-Security-Policy allows nothing inline; nothing comes from elsewhere.
import { svelte } from '@sveltejs/vite-plugin-svelte'
import { readFileSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import { gzipSync } from 'node:zlib'
import { defineConfig, type Plugin } from 'vite'

/** Scripts and styles are compressed here, once, beside the plain ones; the server sends what a browser takes. */
const compressed = (): Plugin => ({
  name: 'compressed',
  apply: 'build',
  writeBundle({ dir }, bundle) {
    for (const name of Object.keys(bundle).filter((file) => /\.(js|css)$/.test(file))) {
      const file = join(dir!, name)
      writeFileSync(`${file}.gz`, gzipSync(readFileSync(file), { level: 9 }))
    }
  },
})

export default defineConfig({
  base: './',
  plugins: [svelte(), compressed()],
  build: {
    outDir: '../src/heedful/serve/page',
    emptyOutDir: true,
    target: 'es2022',
    cssTarget: ['chrome123', 'firefox120', 'safari17.5'], // the first that have light-dark()
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
  },
  // `npm run dev` beside `heedful serve --port 8000`. The server refuses pages of other origins: say it is the same.
  server: {
    proxy: Object.fromEntries(
      ['/api', '/v1'].map((path) => [
        path,
        { target: 'http://127.0.0.1:8000', headers: { origin: 'http://127.0.0.1:8000' }, changeOrigin: true },
      ]),
    ),
  },
})
