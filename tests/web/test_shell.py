"""The page around the tabs: keyboard, colours, addresses, narrow screens, text that stays text."""

from __future__ import annotations

import re

import pytest

TABS = [
    "Start", "Learn", "Write", "Complete", "Chat", "Fill in", "Attention", "Step by step", "Tasks", "Images", "Runs",
]  # fmt: skip
IDS = ["start", "learn", "write", "complete", "chat", "fill", "attention", "steps", "tasks", "images", "runs"]
NARROW = {"width": 390, "height": 844}


def test_tabs_go_round_by_the_keyboard(open_tab, page):
    open_tab()
    assert [tab.inner_text() for tab in page.get_by_role("tablist", name="What to do").get_by_role("tab").all()] == TABS
    page.keyboard.press("Tab")  # the link that skips all this
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    page.get_by_role("tab", name="Write").focus()
    page.get_by_role("tab", name="Write").click()
    for key, name, hash_ in [
        ("ArrowRight", "Complete", "#/complete"),
        ("End", "Runs", "#/runs"),
        ("ArrowRight", "Start", "#/start"),
        ("ArrowLeft", "Runs", "#/runs"),
        ("Home", "Start", "#/start"),
    ]:
        page.keyboard.press(key)
        chosen = page.get_by_role("tab", name=name, exact=True)
        chosen.and_(page.locator("[aria-selected=true]")).wait_for()
        assert page.evaluate("document.activeElement.textContent") == name
        page.wait_for_function("start => location.hash.startsWith(start)", arg=hash_)
    panel = page.get_by_role("tab", name="Start").get_attribute("aria-controls")
    assert page.locator(f"#{panel}").get_attribute("role") == "tabpanel"


def test_focus_is_seen(open_tab, page):
    open_tab("write")
    name_of = "e => e.labels?.[0]?.textContent || e.ariaLabel || e.textContent"
    for name in ["Skip to the content", "Model", "Use dark colours", "Write"]:  # from the top on
        page.keyboard.press("Tab")
        focused = page.locator(":focus")
        assert name in focused.evaluate(name_of)
        assert focused.evaluate("e => getComputedStyle(e).outline").endswith("solid 2px")


NAMELESS = """() => [...document.querySelectorAll('button, input, select, textarea, [role=application]')]
  .filter(e => e.checkVisibility() && !(e.labels?.length || e.ariaLabel || e.getAttribute('aria-labelledby')
               || e.textContent.trim() || e.title))
  .map(e => e.outerHTML.slice(0, 120))"""


def test_every_tab_has_a_heading_a_title_and_names_for_all_its_controls(open_tab, page):
    for tab, label in zip(IDS, TABS, strict=True):
        open_tab(tab)
        assert page.get_by_role("heading", level=1).count() == 1, tab
        page.wait_for_function("start => document.title === start + ' · heedful'", arg=label)
        assert page.evaluate(NAMELESS) == [], tab
        ids = page.evaluate("[...document.querySelectorAll('[id]')].map(e => e.id)")
        assert len(ids) == len(set(ids)), tab


@pytest.mark.parametrize(
    ("tab", "params", "what"),
    [
        ("fill", {"model": "bert-books", "text": "One, two."}, ".piece"),
        ("attention", {"model": "bert-books", "text": "One, two.", "view": "rollout"}, "button.token"),
        ("tasks", {"model": "languages", "text": "One, two."}, ".try"),
    ],
)
def test_small_targets_can_be_hit(open_tab, page, tab, params, what):
    open_tab(tab, **params)
    page.locator(what).first.wait_for()
    for box in (target.bounding_box() for target in page.locator(what).all()):
        assert box["width"] >= 24 and box["height"] >= 24


def test_markup_in_a_text_stays_text(open_tab, page):
    for tab in IDS:
        open_tab(tab, text='<script>window.hit = 1</script><img src=x onerror="window.hit = 1">')
        assert page.evaluate("window.hit") is None, tab
        assert page.locator("main img[src=x], main script").count() == 0, tab


def test_a_narrow_screen_does_not_scroll_sideways(visit, open_tab):
    page = visit(viewport=NARROW, has_touch=True, is_mobile=True)
    for tab in IDS:
        open_tab(tab, on=page)
        assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"], tab
        assert page.evaluate("document.body.scrollWidth") <= NARROW["width"], tab
        chosen = page.get_by_role("tab", selected=True).first.bounding_box()
        assert chosen["x"] >= 0 and chosen["x"] + chosen["width"] <= NARROW["width"], tab


def test_the_picker_leaves_room_for_the_name_on_a_phone(visit, open_tab):
    page = open_tab("write", on=visit(viewport={"width": 340, "height": 700}))
    name, picker = page.get_by_text("heedful", exact=True).bounding_box(), page.locator("header select").bounding_box()
    assert name["x"] + name["width"] < picker["x"] and picker["width"] > 140


def test_dark_and_light_by_the_system_and_by_hand(visit, open_tab):
    light = "rgb(253, 252, 250)"
    page = open_tab("write", on=visit(color_scheme="dark"))
    paper = "getComputedStyle(document.documentElement).backgroundColor"
    dark = page.evaluate(paper)
    assert dark != light
    page.get_by_role("button", name="Use light colours").click()
    assert page.evaluate(paper) == light
    page.reload()  # it is remembered
    page.get_by_role("button", name="Use dark colours").wait_for()
    assert page.evaluate(paper) == light
    page.get_by_role("button", name="Use dark colours").click()
    assert page.evaluate(paper) == dark
    assert page.context.cookies() == []


def test_a_link_reopens_what_was_seen(visit, open_tab):
    text = 'To be & <b>?</b> #1 100% "é"'  # what tiny reads at once
    page = open_tab("attention", model="tiny", text=text)
    page.get_by_role("tab", name="Fill in").click()  # the text is shared
    page.wait_for_function("() => location.hash.startsWith('#/fill')")
    again = visit()
    again.goto(page.url)
    again.get_by_role("heading", level=1).wait_for()
    for seen in (page, again):
        assert seen.get_by_role("tab", selected=True).first.inner_text() == "Fill in"
        assert seen.get_by_label("Model").first.input_value() == "tiny"
        said = seen.evaluate("Object.fromEntries(new URLSearchParams(location.hash.split('?')[1]))")
        assert said["text"] == text and said["model"] == "tiny"


# A page that counts how often its address is written.
COUNTED = """window.written = 0
for (const name of ['replaceState', 'pushState']) {
  const real = history[name].bind(history)
  history[name] = (...all) => { window.written++; real(...all) }
}"""
# Letters typed as fast as the page can take them, however busy this machine is.
TYPED = """async text => {
  for (const letter of text) {
    document.execCommand('insertText', false, letter)
    await new Promise(done => setTimeout(done))
  }
}"""


def test_the_address_is_written_when_typing_pauses_and_before_one_leaves(visit, open_tab):
    page = visit()
    page.add_init_script(COUNTED)
    open_tab("attention", on=page, model="tiny", text="To")
    page.wait_for_function("() => location.hash.includes('text=To')")
    before = page.evaluate("window.written")
    box = page.get_by_label("Text", exact=True)
    box.focus()
    box.press("End")
    page.evaluate(TYPED, " be, or not")
    page.wait_for_function("() => location.hash.includes('or%20not')")
    assert page.evaluate("window.written") - before < 5  # and not once for each of eleven letters
    page.keyboard.type("!")
    page.get_by_role("tab", name="Fill in").click()  # at once
    page.wait_for_function("() => location.hash.startsWith('#/fill')")
    page.go_back()
    page.wait_for_function("() => location.hash.startsWith('#/attention')")
    assert box.input_value() == "To be, or not!"
    box.press("End")
    page.keyboard.type("?")
    page.evaluate("dispatchEvent(new Event('blur'))")  # as if the address had been clicked to copy it
    assert page.evaluate("location.hash").endswith("or%20not%21%3F")


def test_back_returns_to_the_tab_before(open_tab, page):
    open_tab("write", model="shakespeare")
    page.get_by_role("tab", name="Attention").click()
    page.wait_for_function("() => location.hash.startsWith('#/attention')")
    page.go_back()
    page.wait_for_function("() => location.hash.startsWith('#/write')")
    assert page.get_by_role("tab", name="Write").get_attribute("aria-selected") == "true"


def test_the_model_is_shared_where_it_fits(open_tab, page):
    open_tab("write", model="tiny")
    page.get_by_role("tab", name="Attention").click()
    assert page.get_by_label("Model").first.input_value() == "tiny"
    page.get_by_role("tab", name="Images").click()  # not for tiny
    page.wait_for_function("() => document.querySelector('header select').value.startsWith('digits')")
    page.reload()
    page.get_by_role("tab", name="Write").click()
    page.wait_for_function("() => document.querySelector('header select').value === 'tiny'")  # once models are known


def test_what_was_typed_survives_a_tab_without_text_and_a_reload(open_tab, page):
    open_tab("write", model="books", text="It was a dark and stormy night")
    page.get_by_role("tab", name="Runs").click()
    page.wait_for_function("() => location.hash.startsWith('#/runs')")
    page.reload()
    page.get_by_role("tab", name="Write").click()
    assert page.get_by_label("Text", exact=True).input_value() == "It was a dark and stormy night"
    assert page.get_by_label("Model").first.input_value() == "books"


def test_a_model_says_what_it_is_for_and_a_missing_one_is_named(open_tab, page):
    open_tab("tasks", model="reader")
    purpose = page.get_by_role("region", name="What reader is for").inner_text()
    assert "Good at questions" in purpose and "Will fail at" in purpose
    groups = page.locator("header optgroup").evaluate_all("all => all.map(group => group.label)")
    assert {"Answer from a passage", "Tag names", "For other tabs"} <= set(groups)
    open_tab("write", model="nowhere")
    page.get_by_text("nowhere, which is not served here").wait_for()
    page.reload()
    page.get_by_text("heedful serve nowhere").wait_for()
    page.get_by_label("Model").first.select_option("tiny")
    assert page.get_by_text("not served here").count() == 0


@pytest.mark.parametrize(
    "hash_", ["#/nowhere", "#", "#/write?model=../../etc/passwd", "#/%E0%A4%A?x=%", "#/x?coach=no-such", "#/?coach=%23"]
)
def test_nonsense_in_the_address_is_survived(server, page, hash_):
    page.goto(f"{server.url}/{hash_}")
    page.get_by_role("heading", level=1).wait_for()
    shown = "Write" if "write" in hash_ else "Start"
    assert page.get_by_role("tab", name=shown).get_attribute("aria-selected") == "true"
    if shown == "Write":
        assert page.get_by_label("Model").first.input_value() != ""


# Texts whose contrast with what is behind them is below 4.5 (WCAG AA).
CONTRAST = """() => {
  const parse = c => (c.match(/[\\d.]+/g) || []).map(Number)
  const linear = x => (x /= 255) <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b)
  const behind = e => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor)
    if (c.length === 3 || c[3] === 1) return c } return [255, 255, 255] }
  const seen = e => e.checkVisibility({ opacityProperty: true, visibilityProperty: true })
  const low = []
  for (const e of document.querySelectorAll('body *')) {
    const own = [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim())
    if (!own || !seen(e) || e.closest('svg, option, .unseen, :disabled')) continue
    const colour = getComputedStyle(e).color
    if (!colour.startsWith('rgb')) continue
    const [a, b] = [light(parse(colour)), light(behind(e))]
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)
    if (ratio < 4.5) low.push(`${ratio.toFixed(2)} ${e.textContent.trim().slice(0, 40)}`)
  }
  return low
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_what_is_behind_it(visit, open_tab, scheme):
    page = visit(color_scheme=scheme)
    for tab in IDS:
        open_tab(tab, on=page)
        assert page.evaluate(CONTRAST) == [], tab


def test_a_server_that_is_gone_is_said_kindly(server, page, problems):
    page.route(re.compile("/api/"), lambda route: route.abort())
    page.goto(server.url)
    page.get_by_role("alert").get_by_text("The server does not answer").wait_for()
    page.unroute(re.compile("/api/"))
    page.get_by_role("button", name="Try again").click()
    page.get_by_role("heading", level=1).wait_for()
    assert all("Failed to load resource" in said for said in problems)
    problems.clear()


def test_a_server_with_a_key_is_asked_with_it(server, page, problems):
    def answer(route):
        if route.request.headers.get("authorization") == "Bearer sk-right":
            return route.continue_()
        error = {"message": "this server asks for an API key", "type": "", "param": None, "code": None}
        return route.fulfill(status=401, json={"error": error})

    page.route(re.compile("/api/"), answer)
    page.goto(server.url)
    page.get_by_label("This server asks for an API key").fill("sk-right")
    page.get_by_role("button", name="Use it").click()
    page.get_by_role("heading", level=1).wait_for()
    assert "sk-right" not in page.url and "sk-right" not in page.evaluate("JSON.stringify(localStorage)")
    assert all("401" in said for said in problems)
    problems.clear()


def test_nothing_but_this_server_is_needed(server, page):
    said = page.goto(server.url).headers["content-security-policy"]
    assert all(f"{kind}-src 'self';" in said for kind in ("script", "style", "connect"))
    assert "unsafe" not in said
    page.get_by_role("heading", level=1).wait_for()
    loaded = page.evaluate("performance.getEntriesByType('resource').map(entry => new URL(entry.name).origin)")
    assert set(loaded) == {server.url}
