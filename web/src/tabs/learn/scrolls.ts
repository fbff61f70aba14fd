/** Something wide scrolls sideways by the keyboard too: where it does not fit, it can be focused. */
export function scrolls(element: HTMLElement): () => void {
  const look = (): void => {
    if (element.scrollWidth > element.clientWidth) element.tabIndex = 0
    else element.removeAttribute('tabindex')
  }
  const observer = new ResizeObserver(look)
  observer.observe(element)
  return () => observer.disconnect()
}
