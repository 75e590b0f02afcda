"""The chat page in a real browser, at the width of a desk and of a phone. Needs playwright and Chromium; left out without."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.test_calls import k3, talking  # noqa: F401  (fixtures)
from tests.test_server import Served, make, serving, text_of

sync_api = pytest.importorskip("playwright.sync_api")
SIZES = {"desk": (1280, 800), "phone": (390, 844)}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving() as served:
        yield served


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_api.sync_playwright() as playwright:
        try:
            opened = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"] if os.name == "posix" else [])
        except sync_api.Error as error:
            pytest.skip(f"no Chromium ({str(error).splitlines()[0]})")
        yield opened
        opened.close()


@pytest.fixture(params=SIZES)
def page(request: pytest.FixtureRequest, browser: Any, server: Served) -> Iterator[Any]:
    yield from opened_page(request, browser, server, request.param)


def opened_page(request: pytest.FixtureRequest, browser: Any, server: Served, size: str) -> Iterator[Any]:
    """A page that loads nothing from elsewhere and whose console stays empty."""
    width, height = SIZES[size]
    opened = browser.new_page(viewport={"width": width, "height": height})
    opened.set_default_timeout(15_000)
    mistakes: list[str] = []
    opened.on("pageerror", lambda error: mistakes.append(str(error)))
    opened.on("console", lambda line: mistakes.append(line.text) if line.type == "error" and "400" not in line.text else None)
    foreign: list[str] = []
    own = (f"http://127.0.0.1:{server.port}/", "data:")
    opened.on("request", lambda each: None if each.url.startswith(own) else foreign.append(each.url))
    opened.goto(f"http://127.0.0.1:{server.port}/")
    yield opened
    if "SCREENSHOTS" in os.environ:
        opened.screenshot(path=f"{os.environ['SCREENSHOTS']}/{request.node.name}.png")
    opened.close()
    assert mistakes == [] and foreign == []


def until(page: Any, expression: str) -> None:
    """Waits for what is true in the page; its own policy forbids the waiting that evaluates text there."""
    end = time.monotonic() + 15
    while not page.evaluate(expression):
        assert time.monotonic() < end, expression
        page.wait_for_timeout(50)


def say(page: Any, text: str, tokens: int) -> None:
    page.fill("#temperature", "0")
    page.fill("#max_tokens", str(tokens))
    page.fill("#say", text)
    page.click("#send")


def number(page: Any, selector: str) -> float:
    return float(re.findall(r"[\d.]+", page.inner_text(selector))[0])


def test_it_talks_and_shows_what_it_remembers(page: Any, server: Served) -> None:
    until(page, "document.querySelector('#model').textContent === 'tiny'")
    say(page, "Hello", 60)
    page.wait_for_selector("#send:visible")
    shown = page.eval_on_selector("#log .assistant", "box => box.textContent")
    assert shown == text_of("User: Hello\nAssistant:", 60, ("\nUser:",))
    say(page, "And then?", 60)
    until(page, "document.querySelectorAll('#log .assistant').length === 2")
    page.wait_for_selector("#send:visible")
    remembered, prompt = re.findall(r"\d+", page.inner_text("#cached"))
    assert 0 < int(remembered) <= int(prompt)


def test_memory_moves_while_it_talks_and_stop_stops(page: Any, server: Served) -> None:
    def without_end(route: Any) -> None:
        route.continue_(post_data={**route.request.post_data_json, "logit_bias": {"256": -100}})

    page.route("**/v1/chat/completions", without_end)
    page.fill("#seed", "5")
    say(page, "Count for a long time", 4000)
    until(page, "Number(document.querySelector('#tokens').textContent) > 60")
    first = number(page, "#tokens")
    until(page, f"Number(document.querySelector('#tokens').textContent) > {first}")
    assert number(page, "#kv") > 0 and number(page, "#recurrent") > 0 and number(page, "#conv") > 0
    page.wait_for_selector("#layers .meter i")
    assert page.locator("#layers tr").count() == 1 + len(make().config.mixers)
    widths = page.eval_on_selector_all("#bar i", "parts => parts.map(part => part.getBoundingClientRect().width)")
    assert all(width > 0 for width in widths)
    page.click("#stop")
    page.wait_for_selector("#send:visible")
    server.settle()
    kept = page.eval_on_selector("#log .assistant", "box => box.textContent")
    assert kept and "stopped" in page.inner_text("#log .note")


def test_nothing_is_cut_off_and_mistakes_are_shown(page: Any, server: Served) -> None:
    page.fill("#say", "x " * 3000)
    page.click("#send")
    page.wait_for_selector("#log .error")
    assert "the context 4096" in page.inner_text("#log .error")
    wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wide <= 0
    for selector in ("#say", "#send", "#bar"):
        box = page.locator(selector).bounding_box()
        assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= page.viewport_size["width"]
    unlabelled = page.eval_on_selector_all(
        "input, textarea", "all => all.filter(each => !each.labels.length && !each.ariaLabel).length"
    )
    assert unlabelled == 0
    page.click("#clear")
    assert page.locator("#log > div").count() == 0


@pytest.mark.parametrize("size", SIZES)
def test_thoughts_stand_apart_and_fold(
    request: pytest.FixtureRequest, browser: Any, size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Open while they come, closed by the answer, and sent back as thoughts."""
    with talking(request.getfixturevalue("k3"), monkeypatch) as (server, say_text):
        page = next(pages := opened_page(request, browser, server, size))
        bodies: list[Any] = []
        page.on("request", lambda each: bodies.append(each.post_data_json) if each.method == "POST" else None)
        say_text(f"{'hm ' * 40}<|close|>think<|sep|><|open|>response<|sep|>So.<|close|>response<|sep|><|close|>message<|sep|>")
        page.evaluate(
            "window.wasOpen = false; new MutationObserver(() => { const box = document.querySelector('.thought');"
            " if (box?.open && box.lastChild.textContent) window.wasOpen = true; })"
            ".observe(document.querySelector('#log'), {childList: true, subtree: true, characterData: true});"
        )
        say(page, "go", 200)
        page.wait_for_selector("#send:visible")
        assert page.inner_text("#log .assistant") == "So."
        assert page.text_content("#log .thought div") == "hm " * 40
        assert page.evaluate("window.wasOpen") and not page.evaluate("document.querySelector('.thought').open")
        page.click("#log .thought summary")
        assert page.locator("#log .thought div").is_visible()
        assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
        # An answer that ends in the midst of a thought says so.
        say(page, "on", 5)
        page.wait_for_selector("#send:visible")
        assert "most tokens" in page.inner_text("#log .note") and page.locator("#log .thought").count() == 2
        assert bodies[-1]["messages"][1] == {"role": "assistant", "content": "So.", "reasoning_content": "hm " * 40}
        next(pages, None)
