"""The page in a real browser: it updates itself, keeps focus, works by keyboard, in the dark and on a phone."""

from __future__ import annotations

from typing import Any

import pytest
from board_kit import HOSTILE, board, figures, status
from serve_kit import TOKEN, server

from rlinf_actors.sampling.sample import Board, Sample
from tests.browser import chromium, needs_chromium

pytestmark = [pytest.mark.slow, needs_chromium]


def next_sample(found: Board, at: float, done: int, hostile: str = HOSTILE) -> None:
    found.take(Sample(1e9 + at, at, status(hostile=hostile), figures(at, done, hostile), {}, "", 0.002, 0.02))


async def listens(page: Any) -> None:
    """Wait until the page's connection for updates is open: what is new before is not told."""
    opened = "new Promise((resolve) => live.addEventListener('open', () => resolve(true)))"
    await page.evaluate(f"live.readyState === EventSource.OPEN || {opened}")


async def test_page_in_a_browser():
    found, faults = board(), []
    for number in range(20):
        next_sample(found, 115.0 + 5 * number, 40 + 10 * (number % 7) + 10 * number)
    async with server(found) as served, chromium() as browser:
        page = await browser.new_page(viewport={"width": 1280, "height": 860})
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda message: message.type == "error" and faults.append(message.text))
        page.on(
            "request", lambda sent: sent.url.startswith(f"http://127.0.0.1:{served.port}/") or faults.append(sent.url)
        )
        await page.goto(f"http://127.0.0.1:{served.port}/?token={TOKEN}")
        assert TOKEN not in page.url
        assert await page.evaluate("document.cookie") == ""
        assert await page.locator("#nodes tbody tr").count() == 3
        assert await page.locator("script:not([src])").count() == 0
        # it updates itself, and the focus stays
        await page.locator("#groups tbody a").first.focus()
        next_sample(found, 300.0, 400)
        await listens(page)
        served.sampler.on_sample()
        await page.locator("#channels td", has_text="400").first.wait_for()
        assert await page.evaluate("document.activeElement.textContent") == "rollout"
        # by keyboard: skip link, then a page, a filter, a worker, and its stacks
        await page.goto(f"http://127.0.0.1:{served.port}/workers")
        await page.keyboard.press("/")
        await page.keyboard.type("rollout:1")
        await page.keyboard.press("Enter")
        await page.wait_for_url("**/workers?q=rollout%3A1*")
        assert await page.locator("tbody tr").count() == 1
        await page.locator("tbody th a").focus()
        await page.keyboard.press("Enter")
        await page.wait_for_url("**/workers/w-1")
        await page.get_by_role("link", name="Stacks").click()
        await page.locator("pre", has_text="alert(1)").wait_for()
        # its log, which updates itself
        served.said += [f"line {number}" for number in range(150)]
        await page.get_by_role("link", name="Log").click()
        await page.locator("#out pre", has_text="alert(1)").wait_for()
        at_end = "(all) => all.every((box) => box.scrollTop === 0 && box.scrollHeight > box.clientHeight) && all.length"
        newest = "(pre) => pre.getBoundingClientRect().bottom <= pre.parentElement.getBoundingClientRect().bottom"
        assert await page.locator(".newest").evaluate_all(at_end) == 2
        assert await page.locator("#out pre").evaluate(newest)
        served.said.append("the newest line")
        next_sample(found, 400.0, 500)
        await listens(page)
        served.sampler.on_sample()
        await page.locator("#err pre", has_text="the newest line").wait_for()
        assert await page.locator("#err pre").evaluate(newest)
        assert await page.locator("#out script").count() == 0
        # no sideways scrolling on a phone, and the dark colours are dark
        for scheme in ("light", "dark"):
            small = await browser.new_context(color_scheme=scheme, viewport={"width": 390, "height": 800})
            phone = await small.new_page()
            await phone.goto(f"http://127.0.0.1:{served.port}/?token={TOKEN}")
            wide = await phone.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert wide == 0
            colour = await phone.evaluate("getComputedStyle(document.documentElement).backgroundColor")
            assert (sum(map(int, colour.removeprefix("rgb(").rstrip(")").split(","))) < 200) is (scheme == "dark")
            await small.close()
        served.app.close()
    assert faults == []
