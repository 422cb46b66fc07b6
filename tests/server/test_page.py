"""The page in a real browser: streaming, stop, the keyboard, dark, a phone, hostile answers."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from typing import Any

import pytest
from asking import KEY, PROMPTS, alone

playwright: Any = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="neither chromium nor Chrome is installed")


def until(page: Any, wanted: str) -> None:
    """Wait for an expression to be true. The page's policy forbids playwright's own way, `eval`."""
    end = time.monotonic() + 30
    while not page.evaluate(wanted):
        assert time.monotonic() < end, f"{wanted}; {page.text_content('body')}"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def page(server: Any, browser: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The page, with the key; errors of its scripts and of its policy fail the test."""
    context = browser.new_context(**getattr(request, "param", {}))
    opened, errors = context.new_page(), list[str]()
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.on("console", lambda message: errors.append(message.text)
              if message.type == "error" and "401" not in message.text else None)
    opened.goto(server.url)
    opened.fill("#key", KEY)
    opened.locator("#key").blur()
    until(opened, "document.querySelectorAll('#model option').length > 0")
    opened.fill("#max_tokens", "30")
    yield opened
    context.close()
    assert not errors


def written(page: Any) -> str:
    """The text, when all runs are over."""
    until(page, "document.getElementById('go').disabled === false")
    return str(page.text_content("#text"))


def test_page_streams_compares_and_labels_the_source_of_drafts(server: Any, page: Any) -> None:
    page.fill("#prompt", PROMPTS[0])
    assert "speed of a new prompt" in page.text_content("#whose")
    page.keyboard.press("Control+Enter")
    until(page, "document.getElementById('text').textContent.length > 0")
    assert written(page) == alone(server, PROMPTS[0], 30)
    assert page.text_content("#same") == "The plain run wrote the same text."
    assert "draft-model" not in page.text_content("#legend")
    assert page.locator("#legend li").count() >= 1 and page.locator("#tree svg").count() == 1
    page.check("#memory")
    assert "for your API key" in page.text_content("#whose")


def test_stop_button_and_escape_end_generation_and_keep_focus(page: Any) -> None:
    page.route("**/v1/completions", lambda route: None)     # or the text may end before the keys
    page.uncheck("#compare")
    for stop in (lambda: page.keyboard.press("Escape"), lambda: page.keyboard.press("Enter")):
        page.focus("#go")
        page.keyboard.press("Enter")
        until(page, "document.activeElement.id === 'stop'")
        stop()
        until(page, "document.getElementById('same').textContent === 'Stopped.'")
        assert page.evaluate("document.activeElement.id") == "go"


@pytest.mark.parametrize("page", [
    {"viewport": {"width": 360, "height": 740}, "color_scheme": "dark", "has_touch": True},
    {"viewport": {"width": 1280, "height": 800}, "color_scheme": "light"},
], indirect=True, ids=["phone, dark", "desktop, light"])  # fmt: skip
def test_page_has_no_clipped_content_and_supports_dark_mode(page: Any) -> None:
    page.fill("#max_tokens", "20")
    page.click("#go")
    written(page)
    wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    assert wide <= 0, "the page does not scroll sideways"
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    light = sum(map(int, colour.removeprefix("rgb(").removesuffix(")").split(",")))
    dark = page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    assert light < 150 if dark else light > 600


def test_an_answer_with_a_script_is_text(page: Any) -> None:
    """In the text, in a tooltip and in the drawn tree."""
    hostile = "<script>document.title = 'hacked'</script><img src=x onerror=alert(1)>&amp;"
    page.route("**/v1/completions", lambda route: route.fulfill(
        content_type="text/event-stream", body="".join(f"data: {line}\n\n" for line in (
            page.evaluate("""text => JSON.stringify({choices: [{text}], draftproof: {
                pieces: [[text, text]], tokens: 1,
                tree: [[text, -1, true, text], [text, 0, true, text]]}})""", hostile),
            '{"choices": [], "usage": {"completion_tokens": 2, "completion_tokens_details": '
            '{"accepted_prediction_tokens": 1, "rejected_prediction_tokens": 0}}}', "[DONE]"))))
    page.uncheck("#compare")
    page.click("#go")
    assert written(page) == hostile
    assert page.title() == "draftproof" and page.locator("#text script, #text img").count() == 0
    assert page.locator("#tree img, #tree script").count() == 0
