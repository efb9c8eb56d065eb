"""The pictures of `rlinf-actors serve` in docs/how-to/watch-a-cluster.md are what its pages show of one cluster."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import NamedTuple

import aiohttp
import pytest
from serve_kit import TOKEN, server

from tests import pictures, shown_cluster
from tests.browser import chromium, needs_chromium

FOLDER = pictures.DOCS / "how-to" / "pictures"


class Picture(NamedTuple):
    """A page that has a picture: its path, and the browser's width and colours; *whole* with what is below the fold."""

    path: str
    width: int = 1280
    scheme: str = "light"
    whole: bool = True


WORKER = f"/workers/{shown_cluster.SHOWN_WORKER.replace(':', '-')}"
PICTURES = {
    "overview": Picture("/"),
    "workers": Picture("/workers"),
    "node": Picture(f"/nodes/{shown_cluster.NODE_IDS[0]}"),
    "worker": Picture(WORKER),
    "worker-log": Picture(f"{WORKER}/log"),
    "phone": Picture("/", 390, "dark", whole=False),
}


@asynccontextmanager
async def served() -> AsyncIterator[SimpleNamespace]:
    now = time.time()
    said = shown_cluster.output(now)

    async def last_lines(node_id: str, job: str, name: str, most: int) -> list[str]:
        return said[name.rpartition(".")[2]][-most:]

    async with server(shown_cluster.cluster(now), endpoint=shown_cluster.ENDPOINT) as found:
        found.sampler.last_lines = last_lines
        yield found


async def page_of(port: int, path: str) -> str:
    async with (
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session,
        session.get(f"http://127.0.0.1:{port}{path}") as answer,
    ):
        assert answer.status == 200
        return await answer.text()


@needs_chromium
@pytest.mark.slow  # a browser takes seconds; the words are compared in each run
@pytest.mark.skipif(not pictures.MAKES, reason="RLINF_ACTORS_TEST_PICTURES=1 writes them")
async def test_pictures_are_made():
    async with served() as found, chromium() as browser:
        for name, picture in PICTURES.items():
            context = await browser.new_context(
                color_scheme=picture.scheme, viewport={"width": picture.width, "height": 844}, device_scale_factor=1.25
            )
            page = await context.new_page()
            await page.goto(f"http://127.0.0.1:{found.port}{picture.path}?token={TOKEN}")
            shot = await asyncio.wait_for(page.screenshot(full_page=picture.whole), 20)
            pictures.write_png(FOLDER / f"{name}.png", shot, await page_of(found.port, picture.path))
            await context.close()
        found.app.close()


async def test_pictures_have_the_words_of_their_pages():
    async with served() as found:
        for name, picture in PICTURES.items():
            path = FOLDER / f"{name}.png"
            page = await page_of(found.port, picture.path)
            assert pictures.words_of_png(path) == pictures.words(page), f"{name}: {pictures.AGAIN}"
            assert path.stat().st_size < pictures.MOST_BYTES, name


def test_shown_cluster_agrees_with_itself():
    board = shown_cluster.cluster(time.time())
    for node in board.nodes:
        here = [worker.figures for worker in board.workers if worker.node is node.state]
        assert len(here) == node.workers
        lost = node.state.state == "lost"
        assert lost is (node.figures is None) is (node.state.last_seen_s > 2)
        if node.figures is None or node.cpu is None:
            assert (lost, here) == (True, [])
            continue
        found = node.figures
        cpu = sum(worker.cpu or 0.0 for worker in board.workers if worker.node is node.state)
        assert cpu < node.cpu * found.cpus < found.cpus
        assert sum(one.process.rss_bytes for one in here) < found.memory_bytes - found.memory_free_bytes
        held = sum(max(0, one.accelerator_bytes) for one in here)
        assert held <= sum(device.memory_used_bytes for device in found.devices)
    assert all(depth <= channel.figures.max_items for channel in board.channels for depth in channel.depths)
    restarts = sum(worker.state.restarts for worker in board.workers)
    assert restarts == board.event_counts["worker_restarted"] == board.event_counts["worker_died"]
