// The scripts that ship with the page: the Markdown files beside this one, each fetched when it is first asked for.

const files = import.meta.glob<string>('./scripts/*.md', { query: '?raw', import: 'default' })

/** The text of a script by its name; null: there is none of that name. */
export async function shipped(name: string): Promise<string | null> {
  return (await files[`./scripts/${name}.md`]?.()) ?? null
}
