"""The distribution's Chromium, driven by playwright, for tests of pages."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import AsyncIterator
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium")
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium")


@contextlib.asynccontextmanager
async def chromium() -> AsyncIterator[Any]:
    """A browser of its own, closed at the end."""
    playwright = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
    async with playwright.async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        await browser.close()
