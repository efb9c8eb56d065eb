"""The host process of a closed channel ends by itself, and its creator does not take that for a failed launch."""

from __future__ import annotations

import asyncio
import os
import queue
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from rlinf_actors.worker.channelhost import _Ending


def test_host_ends_after_its_creator_was_told_that_it_is_constructed(monkeypatch):
    """Else a channel that is closed and empty at once has ended before its launch has, which is a failed launch."""
    did: queue.SimpleQueue[str] = queue.SimpleQueue()

    def submit(call: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(asyncio.run(call))
        return done

    monkeypatch.setattr(os, "_exit", lambda code: did.put(f"exit {code}"))
    server = SimpleNamespace(
        constructed=SimpleNamespace(wait=lambda: did.put("waited for the answer to its construction")),
        close=lambda linger_ms: did.put("closed its server"),
    )
    runtime = SimpleNamespace(io=SimpleNamespace(submit=submit), close=lambda: did.put("closed its runtime"))
    _Ending(runtime, server, "channel:c", 0).begin()
    assert [did.get(timeout=10) for _ in range(4)] == [
        "waited for the answer to its construction", "closed its server", "closed its runtime", "exit 0",
    ]  # fmt: skip
