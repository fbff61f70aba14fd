/** Something wide scrolls sideways by the keyboard too: where it does not fit, it can be focused. */
export function scrolls(element: HTMLElement): () => void {
  const look = (): void => {
    const wide = element.scrollWidth > element.clientWidth
    for (const [name, value] of Object.entries({ tabindex: '0', role: 'group' })) {
      if (wide) element.setAttribute(name, value)
      else element.removeAttribute(name)
    }
  }
  const observer = new ResizeObserver(look)
  observer.observe(element)
  return () => observer.disconnect()
}
