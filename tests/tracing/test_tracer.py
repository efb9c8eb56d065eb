"""Tracer: spans of user code, and nothing at all while nothing is traced."""

from __future__ import annotations

import asyncio
import timeit
from collections.abc import Iterator
from time import process_time

import pytest

from rlinf_actors import Tracer
from rlinf_actors.tracing import recorder, ring
from rlinf_actors.tracing.recorder import Recorder
from tests import pace


@pytest.fixture
def traced() -> Iterator[Recorder]:
    yield recorder.start(1 << 16, {})
    recorder.stop()


def names(one: Recorder) -> list[tuple[str, str, bool]]:
    return [(span.name, span.cat, span.end >= span.start) for span in ring.read(bytes(one.memory)).spans]


def test_nothing_happens_while_nothing_is_traced() -> None:
    assert recorder.active is None
    Tracer.trace_begin("x")
    Tracer.trace_end("x")
    with Tracer.trace_span("x", cat="c", args={"a": 1}):
        pass

    @Tracer.trace_func
    def seven() -> int:
        return 7

    assert seven() == 7


def test_every_form_records_a_span(traced: Recorder) -> None:
    Tracer.trace_begin("begun", cat="a", args={"i": 0})
    with Tracer.trace_span("block", "b"):
        pass
    Tracer.trace_end("begun", cat="a")

    @Tracer.trace_func
    def plain() -> None: ...

    @Tracer.trace_func()
    def called() -> None: ...

    @Tracer.trace_func("actor")
    def named() -> None: ...

    @Tracer.trace_func(cat="rollout")
    async def later() -> int:
        return 3

    plain()
    called()
    named()
    assert asyncio.run(later()) == 3
    assert names(traced) == [
        ("begun", "a", True), ("block", "b", True), ("plain", "default", True), ("called", "default", True),
        ("named", "actor", True), ("later", "rollout", True),
    ]  # fmt: skip


def test_span_ends_also_after_an_error(traced: Recorder) -> None:
    with pytest.raises(ValueError, match="oops"), Tracer.trace_span("failing"):
        raise ValueError("oops")
    assert names(traced) == [("failing", "default", True)]


def test_coroutines_of_one_loop_end_their_own_spans(traced: Recorder) -> None:
    async def step(first: asyncio.Event, then: asyncio.Event) -> None:
        with Tracer.trace_span("step"):
            first.set()
            await then.wait()

    async def both() -> None:
        a, b = asyncio.Event(), asyncio.Event()
        await asyncio.gather(step(a, b), step(b, a))

    asyncio.run(both())
    assert names(traced) == [("step", "default", True)] * 2


def test_event_takes_less_than_a_microsecond(traced: Recorder) -> None:
    """On a quiet machine. On a busy one, where the shared core makes all code slower, less than 60 appends."""
    found: list[int] = []
    count = 5_000

    def least(work: str) -> float:
        times = timeit.repeat(
            work, globals={"one": traced, "found": found}, number=count, repeat=30, timer=process_time
        )
        return min(times) / count

    least("one.end(1)")  # touches the memory
    append = least("found.append(1)")
    event = max(least("one.begin('step', 'runner')"), least("one.end(7)"))
    assert event < max(1e-6 * pace.slowness, 60 * append), f"{event * 1e9:.0f} ns, an append {append * 1e9:.0f} ns"
