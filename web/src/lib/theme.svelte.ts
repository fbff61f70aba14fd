// Light and dark: as the system has it, unless chosen here. Colours for canvases, which cannot read CSS variables.

export type Choice = 'system' | 'light' | 'dark'
const NAME = 'heedful-theme'
const system = matchMedia('(prefers-color-scheme: dark)')

class Theme {
  choice = $state<Choice>((localStorage.getItem(NAME) as Choice | null) ?? 'system')
  #system = $state(system.matches)

  constructor() {
    system.addEventListener('change', () => (this.#system = system.matches))
    // chosen in another window, or around this one
    addEventListener('storage', ({ key, newValue }) => {
      if (key !== NAME) return
      this.choice = (newValue as Choice | null) ?? 'system'
      this.#show()
    })
    this.#show()
  }

  get dark(): boolean {
    return this.choice === 'dark' || (this.choice === 'system' && this.#system)
  }

  set(choice: Choice): void {
    this.choice = choice
    if (choice === 'system') localStorage.removeItem(NAME)
    else localStorage.setItem(NAME, choice)
    this.#show()
  }

  #show(): void {
    if (this.choice === 'system') delete document.documentElement.dataset.theme
    else document.documentElement.dataset.theme = this.choice
  }
}

export const theme = new Theme()

/** The value of a design token, such as colour('accent'). Reading it in an effect or a derivation follows the theme. */
export function colour(name: string): string {
  const { dark } = theme
  const value = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim()
  return /^light-dark\((.+),(.+)\)$/.exec(value)?.[dark ? 2 : 1].trim() ?? value // a variable is text: nobody has chosen yet
}
