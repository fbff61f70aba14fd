"""Chat: messages and replies, edited and tried again, kept in the browser; the raw prompt; replies in other tabs;
replies by a schema, and tools."""

from __future__ import annotations

import json
import re
from urllib.parse import quote

TEXT = '<img src=x onerror="window.hit = 1"> a cat'
SHORT = {"model": "small", "length": 12, "seed": 1}


def say(page, text: str, turns: int):
    """Send a message, and wait until it is answered: so many messages are shown then."""
    page.get_by_role("textbox", name="Message").fill(text)
    page.keyboard.press("Enter")
    return answered(page, turns)


def answered(page, turns: int):
    page.locator(".composer").get_by_role("button", name="Send").wait_for()
    page.wait_for_function("n => document.querySelectorAll('.turn').length === n", arg=turns)
    return page.locator(".turn")


def act(page, name: str, nth: int = -1) -> None:
    page.locator(".turn").nth(nth).get_by_role("button", name=name).click()


def test_what_was_said_is_edited_tried_again_and_kept(visit, open_tab, page):
    open_tab("chat", **SHORT)
    assert page.get_by_role("button", name="New chat").is_disabled()
    first = say(page, TEXT, 2).nth(1).locator(".bubble").inner_text()
    assert page.locator(".turn.mine .text").inner_text() == TEXT and page.evaluate("window.hit") is None
    act(page, "Go on")  # it ended by its length
    answered(page, 2)
    assert page.locator(".turn").nth(1).locator(".bubble").inner_text().startswith(first)
    act(page, "The version before")
    assert page.locator(".turn").nth(1).locator(".bubble").inner_text() == first
    assert page.evaluate("document.activeElement.ariaLabel") == "The next version"  # the focus stays where one is
    act(page, "Edit", 0)
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.innerText") == "Edit"
    act(page, "Edit", 0)
    page.get_by_role("textbox", name="The message").fill("another question")
    page.keyboard.press("Enter")
    answered(page, 2)
    page.keyboard.type("what is")
    assert page.get_by_role("textbox", name="Message").input_value() == "what is"
    page.get_by_role("textbox", name="Message").fill("")
    assert page.locator(".turn.mine .text").inner_text() == "another question"
    assert "2 of 2" in page.locator(".turn.mine .acts").inner_text()
    act(page, "The version before", 0)
    assert page.locator(".turn.mine .text").inner_text() == TEXT  # nothing is lost
    with page.expect_download() as file:
        page.get_by_role("button", name="Export all").click()
    saved = json.loads(file.value.path().read_text())
    assert saved["conversations"][0]["turns"][0]["content"] == TEXT
    page.wait_for_function("() => location.hash.includes('said=')")
    page.reload()
    page.locator(".turn.mine .text").wait_for()
    assert page.locator(".turn.mine .text").inner_text() == TEXT
    again = visit()
    again.goto(page.url)  # in a browser that does not have it
    again.locator(".turn.mine .text").wait_for()
    assert again.locator(".turn.mine .text").inner_text() == TEXT
    page.get_by_role("button", name="New chat").click()
    assert page.locator(".turn").count() == 0
    page.get_by_label("A file of conversations").set_input_files(file.value.path())
    page.locator(".turn.mine .text").wait_for()


def test_what_the_model_reads_and_how_sure_it_was(open_tab, page, problems):
    open_tab("chat", **SHORT, tint="true")
    say(page, "a dog", 2)
    page.get_by_role("listbox", name="Tokens of the reply").wait_for()
    act(page, "Raw prompt")
    prompt = page.get_by_role("dialog").get_by_role("list", name="Tokens of the prompt")
    prompt.wait_for()
    assert re.sub(r"\s+", " ", prompt.inner_text()).startswith("<|im_start|>") and "dog" in prompt.inner_text()
    page.keyboard.press("Escape")
    act(page, "Open in Attention")
    page.locator("#panel-attention canvas[data-lines]").wait_for()
    assert page.get_by_text("special tokens in it are read as such").is_visible()
    assert page.locator(".from .token").first.inner_text() == "<|im_start|>"
    page.go_back()
    page.locator("#panel-chat .turn").first.wait_for()
    act(page, "Open in Complete")
    page.get_by_role("listbox", name="Tokens and their probabilities").wait_for()
    assert page.get_by_text("<|im_start|>").first.is_visible()


def test_a_reply_of_which_nothing_came_can_be_asked_for_again(open_tab, page, problems):
    open_tab("chat", **SHORT)
    asked = re.compile("/v1/chat/completions")
    page.route(asked, lambda route: route.abort())
    turns = say(page, "a dog", 1)
    page.get_by_role("alert").get_by_text("The server does not answer").wait_for()
    page.unroute(asked)
    page.get_by_role("button", name="Try again").click()
    assert answered(page, 2).nth(1).locator(".bubble").inner_text()
    page.route(asked, lambda route: None)  # it does not answer at all
    page.get_by_role("textbox", name="Message").fill("a cat")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Stop").click()
    answered(page, 3)
    assert turns.last.locator(".text").inner_text() == "a cat"
    assert all("Failed to load resource" in said for said in problems)
    problems.clear()


def test_complete_offers_the_chat_of_a_chat_model(open_tab, page):
    open_tab("complete", model="small", text="a cat")
    page.get_by_role("link", name="Ask it in Chat").click()
    page.locator("#panel-chat h1").wait_for()
    assert page.get_by_role("textbox", name="Message").input_value() == "a cat"
    open_tab("complete", model="tiny", text="To be")
    assert page.get_by_role("link", name="Ask it in Chat").count() == 0


GOOD = {
    "type": "object",
    "properties": {"good": {"type": "boolean"}},
    "required": ["good"],
    "additionalProperties": False,
}


def test_a_reply_keeps_to_the_schema_at_the_side(open_tab, page):
    open_tab("chat", model="small", length=60, seed=1)
    page.locator("summary", has_text="JSON schema").click()
    page.get_by_role("button", name="A person").click()
    box = page.get_by_role("textbox", name="JSON schema")
    assert json.loads(box.input_value())["required"] == ["name", "age", "city"]
    box.fill('{"type":\n  object}')
    page.get_by_text("Line 2, column 3: object} is not JSON here.").wait_for()
    page.get_by_role("textbox", name="Message").fill("is a cat good")
    page.keyboard.press("Enter")  # it waits for what is wrong
    page.get_by_role("alert").get_by_text("The schema: Line 2, column 3").wait_for()
    box.fill(json.dumps(GOOD))
    page.get_by_role("alert").wait_for(state="detached")
    text = say(page, "is a cat good", 2).nth(1).locator(".bubble").inner_text()
    assert isinstance(json.loads(text)["good"], bool)
    act(page, "Pretty print")
    assert page.locator(".turn").nth(1).locator(".bubble").inner_text() == json.dumps(json.loads(text), indent=2)
    with page.expect_download() as file:
        page.get_by_role("button", name="Export all").click()
    (kept,) = json.loads(file.value.path().read_text())["conversations"]
    assert json.loads(kept["schema"]) == GOOD and kept["turns"][1]["json"]


def test_tools_are_called_and_what_they_return_is_answered(visit, open_tab, page):
    open_tab("chat", model="small", length=60, seed=1)
    page.locator("summary", has_text="Tools").click()
    tool = {"type": "function", "function": {"name": "weigh", "parameters": GOOD}}
    page.get_by_role("textbox", name="Tools").fill(json.dumps([tool]))
    page.get_by_label("Always call one").check()
    say(page, "how heavy is a cat", 2)
    card = page.get_by_role("region", name="Call 1 of 1")
    assert card.locator("code").inner_text() == "weigh" and card.locator("dt").inner_text() == "good"
    act(page, "Edit")
    calls = page.get_by_role("textbox", name="The calls")
    calls.fill('[{"name": "weigh", "arguments": {"good": 7}}]')
    act(page, "Keep")
    assert card.locator("dd").inner_text() == "7"
    card.get_by_role("textbox", name="Its result").fill("four\nkilos")
    page.keyboard.press("Enter")
    answered(page, 4)
    assert page.locator(".turn").nth(2).locator(".text").inner_text() == "four\nkilos"
    act(page, "Raw prompt")
    prompt = page.get_by_role("dialog").get_by_role("region", name="The prompt")
    prompt.get_by_role("list").wait_for()
    read = re.sub(r"\s", "", prompt.inner_text())
    assert '{"name":"weigh","arguments":{"good":7}}' in read and "four⏎kilos" in read
    page.keyboard.press("Escape")
    page.wait_for_function("() => location.hash.includes('said=')")
    again = visit()
    again.goto(page.url)  # in a browser that does not have it
    again.get_by_role("region", name="Call 1 of 1").wait_for()
    assert again.locator(".turn").count() == 4
    act(page, "Edit", 2)
    page.get_by_role("textbox", name="The message").fill("five kilos")
    page.keyboard.press("Enter")
    answered(page, 4)
    assert "2 of 2" in page.locator(".turn").nth(2).inner_text()


REPLY = """Steps:

1. Write
   - first
   - second

   ```python
   print("<b>")
   ```
2. Run ***it***

***

<img src=x onerror="window.hit = 1"> [here](https://example.org/) [not](javascript:hit) [nor](#/write)"""


def linked(server, *said: str, **more: str) -> str:
    """The address of a conversation without a system prompt."""
    params = {"model": "small", "said": json.dumps(["", *said]), "talk": "abcdefgh"} | more
    return f"{server.url}/#/chat?" + "&".join(f"{name}={quote(value, safe='')}" for name, value in params.items())


def test_markdown_is_shown_as_elements_and_html_as_text(page, server):
    page.goto(linked(server, "How?", REPLY, markdown="true"))
    reply = page.locator(".bubble .markdown")
    reply.wait_for()
    assert reply.locator("ol > li").count() == 2
    first = reply.locator("ol > li").first
    assert first.locator("ul > li").all_inner_texts() == ["first", "second"]
    assert first.locator("pre").inner_text() == 'print("<b>")'
    assert reply.locator("em strong, strong em").inner_text() == "it" and reply.locator("hr").count() == 1
    assert 'onerror="window.hit = 1"' in reply.inner_text() and reply.locator("img, script").count() == 0
    assert page.evaluate("window.hit") is None
    links = reply.locator("a")
    assert [link.get_attribute("href") for link in links.all()] == ["https://example.org/"]
    assert "noopener" in links.first.get_attribute("rel")


def test_what_two_windows_say_in_one_conversation_is_kept(visit, open_tab, page):
    open_tab("chat", **SHORT)
    say(page, "a dog", 2)
    page.wait_for_function("() => location.hash.includes('said=')")
    other = page.context.new_page()
    other.goto(page.url)
    other.locator(".turn").nth(1).wait_for()
    for window, text in ((page, "from the first"), (other, "from the second")):
        window.get_by_role("textbox", name="Message").fill(text)
    page.keyboard.press("Enter")
    other.keyboard.press("Enter")
    for window in (page, other):
        window.locator(".composer").get_by_role("button", name="Send").wait_for()
    kept = "() => Object.keys(localStorage).filter(k => k.startsWith('heedful-chat-')).map(k => localStorage[k])"
    for window in (page, other):
        window.wait_for_function(
            f"() => {{ const all = ({kept})(); const turns = JSON.parse(all[0]).turns; "
            "return all.length === 1 && turns.length === 6 && turns.every(t => t.role === 'user' || t.end) }"
        )
        said = json.loads(window.evaluate(kept)[0])["turns"]
        assert {turn["content"] for turn in said if turn["role"] == "user"} == {
            "a dog", "from the first", "from the second"
        }  # fmt: skip
        window.get_by_text("of 2").first.wait_for()  # the two are versions of one place


def test_json_that_was_cut_says_so(open_tab, page):
    open_tab("chat", model="small", length=2, seed=1)
    page.locator("summary", has_text="JSON schema").click()
    page.get_by_role("button", name="A person").click()
    say(page, "a cat", 2)
    page.get_by_text("The reply was cut at its maximum length: its JSON is not complete.").wait_for()
