// The page is built into the Python package, which serves it. Scripts and styles are files of their own, because the
// server's Content-Security-Policy allows nothing inline; nothing comes from elsewhere.
import { svelte } from '@sveltejs/vite-plugin-svelte'
import { defineConfig } from 'vite'

export default defineConfig({
  base: './',
  plugins: [svelte()],
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
