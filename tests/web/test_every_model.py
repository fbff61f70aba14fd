"""Every model that ships, in every tab that it fits, with the input that it begins with."""

from __future__ import annotations

from support.playground import exact

TABS = ("write", "complete", "chat", "fill", "attention", "steps", "tasks", "images")
DIGITS = {"digits-vit", "digits-gpt"}
# The page in another tab or with another model, without being loaded again.
GO = """([tab, model]) => {
  const link = document.body.appendChild(document.createElement('a'))
  link.href = `#/${tab}?model=${model}`
  link.click()
  link.remove()
}"""
READY = """([tab, model]) => document.querySelector(`#panel-${tab} h1`)
  && (document.querySelector('header select')?.value === model || document.querySelector('main .notice'))
  && !document.querySelector('.notice.loading, [aria-busy=true]')"""
# What is drawn past the right edge of the window, and is not in something that scrolls.
OUTSIDE = """() => [...document.querySelectorAll('main *')].filter(one => {
  const box = one.getBoundingClientRect()
  if (!box.width || box.right <= innerWidth + 1 || !one.checkVisibility()) return false
  for (let outer = one.parentElement; outer; outer = outer.parentElement)
    if (getComputedStyle(outer).overflowX !== 'visible') return false
  return true
}).map(one => one.outerHTML.slice(0, 80))"""
SHOWN = """() => {
const written = main => {
  const copy = main.cloneNode(true)
  for (const list of copy.querySelectorAll('[aria-label="The choice"]')) list.remove() // what may come next, <unk> too
  return copy.textContent
}
return {
  text: written(document.querySelector('main')),
  fields: [...document.querySelectorAll('main textarea, main .sheet')].map(one => one.value ?? one.innerText),
  errors: [...document.querySelectorAll('main .notice.error, main [role=alert]')].map(one => one.innerText),
  pictures: [...document.querySelectorAll('.examples button')].map(one => one.ariaLabel),
}}"""


def faults(page, model: str, tab: str) -> list[str]:
    """What is wrong with what is on the screen."""
    shown = page.evaluate(SHOWN)
    found = [f"error: {error}" for error in shown["errors"]]
    found += [f"unknown token {token}" for token in ("<unk>", "[UNK]", "\ufffd", "unknown to this model")
              if token in shown["text"]]  # fmt: skip
    found += [f"foreign text: {text}" for text in shown["fields"] if unreadable(model, text.strip("\u200b\n"))]
    if tab == "images":
        known = {str(i) for i in range(10)} if model in DIGITS else set(exact(model).model.config.labels)
        found += [f"foreign picture: {label}" for label in shown["pictures"] if label not in known]
        found += [] if shown["pictures"] else ["no picture"]
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 800})
        found += [f"too wide at {width}: {element}" for element in page.evaluate(OUTSIDE)[:2]]
    page.set_viewport_size({"width": 1280, "height": 800})
    return found


def unreadable(model: str, text: str) -> bool:
    tokenizer = exact(model).tokenizer
    return tokenizer is not None and tokenizer.unk_id in tokenizer.encode(text)


def test_every_model_opens_in_every_tab_with_what_it_can_read(open_tab, page):
    open_tab("start")
    models = page.evaluate("async () => (await (await fetch('/api/models')).json()).models.map(m => m.id)")
    wrong, opened = {}, set()
    for model in models:
        if model == "small":
            continue  # it does not ship
        for tab in TABS:
            page.evaluate(GO, [tab, model])
            page.wait_for_function(READY, arg=[tab, model])
            if page.get_by_text("which is not for this tab").count():
                continue
            opened.add(model)
            if found := faults(page, model, tab):
                wrong[f"{model} in {tab}"] = found
    assert wrong == {}
    assert opened == set(models) - {"small"}
