// Layout is prettier's; eslint looks for mistakes.
import js from '@eslint/js'
import prettier from 'eslint-config-prettier'
import svelte from 'eslint-plugin-svelte'
import { defineConfig } from 'eslint/config'
import globals from 'globals'
import ts from 'typescript-eslint'
import svelteConfig from './svelte.config.js'

export default defineConfig(
  { ignores: ['node_modules', 'src/lib/schema.ts'] },
  js.configs.recommended,
  ts.configs.recommended,
  svelte.configs.recommended,
  prettier,
  svelte.configs.prettier,
  {
    languageOptions: { globals: { ...globals.browser, ...globals.node } },
    rules: {
      eqeqeq: ['error', 'always', { null: 'ignore' }],
      'no-undef': 'off', // TypeScript sees it
      '@typescript-eslint/no-unused-expressions': ['error', { allowShortCircuit: true, allowTernary: true }],
      '@typescript-eslint/no-unused-vars': ['error', { argsIgnorePattern: '^_', varsIgnorePattern: '^_' }],
    },
  },
  {
    files: ['**/*.ts'], // in Svelte's files prettier breaks every line that can be broken
    rules: {
      'max-len': [
        'error',
        { code: 120, ignoreStrings: true, ignoreTemplateLiterals: true, ignoreRegExpLiterals: true },
      ],
    },
  },
  {
    files: ['**/*.svelte', '**/*.svelte.ts'],
    languageOptions: { parserOptions: { parser: ts.parser, extraFileExtensions: ['.svelte'], svelteConfig } },
    rules: {
      'no-useless-assignment': 'off', // it does not see what a $derived reads the next time
      'prefer-const': 'off', // `let { ... } = $props()`, as in Svelte's documentation
      'svelte/no-unused-svelte-ignore': 'off', // svelte-check reports them
      'svelte/no-useless-mustaches': 'off', // {' '} is a space that the compiler keeps
      'svelte/prefer-const': ['error', { excludedRunes: ['$props', '$derived'] }],
      'svelte/prefer-svelte-reactivity': 'off', // maps and sets that nothing is drawn from
    },
  },
)
