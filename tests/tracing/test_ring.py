"""The ring: what is written is read, at any time, and what fell out is counted."""

from __future__ import annotations

import mmap
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlinf_actors.tracing import recorder, ring
from rlinf_actors.tracing.recorder import Recorder
from rlinf_actors.tracing.ring import Layout, ProcessTrace


def new(capacity: int = 1024, names: int = 64, args: int = 16) -> Recorder:
    layout = Layout(capacity, names, args)
    return Recorder(mmap.mmap(-1, layout.size), layout, {"name": "a:0", "pid": 7})


def read(one: Recorder) -> ProcessTrace:
    return ring.read(bytes(one.memory))


@pytest.fixture
def untraced() -> Iterator[None]:
    yield
    recorder.stop()


def test_span_has_name_category_arguments_and_thread() -> None:
    one = new()
    span = one.begin("step", "runner", {"step_idx": 3})
    one.end(span)
    found = read(one)
    assert found.process == {"name": "a:0", "pid": 7}
    (step,) = found.spans
    assert (step.name, step.cat, step.args) == ("step", "runner", {"step_idx": 3})
    assert step.end >= step.start > 0
    assert found.threads[step.thread] == threading.current_thread().name


def test_end_by_name_ends_the_last_span_of_that_name_on_the_thread() -> None:
    one = new()
    outer, inner = one.begin("a"), one.begin("a")
    thread = threading.Thread(target=lambda: one.begin("a"))
    thread.start()
    thread.join()
    one.end_last("a")
    found = {span.number: span for span in read(one).spans}
    assert found[inner].end > 0
    assert found[outer].end < 0
    one.end_last("a")
    found = {span.number: span for span in read(one).spans}
    assert found[outer].end > 0
    assert sum(span.end < 0 for span in found.values()) == 1  # the other thread's


def test_spans_with_numbers_may_end_in_any_order() -> None:
    one = new()
    first, second = one.begin("a"), one.begin("a")
    one.end(first)
    found = {span.number: span.end for span in read(one).spans}
    assert found[first] > 0 > found[second]


def test_newest_events_stay_and_the_others_are_counted() -> None:
    one = new()
    for number in range(3000):
        one.end(one.begin(f"span {number % 10}"))
    found = read(one)
    assert found.fallen_out == 6000 - 1024
    assert len(found.spans) == 512
    assert found.cut == 0
    one.begin("one more")
    assert read(one).cut == 1  # its end is there, its begin was overwritten


def test_names_without_room_are_counted_and_cost_no_memory() -> None:
    one = new(names=8)
    for number in range(1000):
        one.begin(f"name {number}")
    found = read(one)
    assert found.unnamed >= 990
    assert len(one._names) <= 8
    assert {span.name for span in found.spans[-10:]} == {"(too many names)"}


def test_short_lived_threads_leave_room_for_names() -> None:
    one = new(names=16)

    def work() -> None:
        one.end(one.begin("work"))

    for number in range(100):
        thread = threading.Thread(target=work, name=f"thread {number}")
        thread.start()
        thread.join()
    one.begin("a new name")
    found = read(one)
    assert found.unnamed == 0
    assert found.spans[-1].name == "a new name"
    assert found.threads[found.spans[0].thread] == "thread 0"
    assert found.threads[found.spans[-2].thread] == "(more threads)"


def test_overwritten_arguments_are_counted_and_odd_ones_are_kept_as_text() -> None:
    one = new(args=4)
    for number in range(6):
        one.begin("x", "c", {"n": number})
    circle: dict[str, object] = {}
    circle["self"] = circle
    one.begin("x", "c", circle)
    one.begin("x", "c", {"long": "y" * 1000})
    found = read(one)
    assert found.args_lost == 4
    assert [span.args for span in found.spans[4:6]] == [{"n": 4}, {"n": 5}]
    assert "self" in str(found.spans[6].args["args"])
    assert str(found.spans[7].args["args"]).startswith('{"long"')


def test_arrows_belong_to_their_spans() -> None:
    one = new()
    span = one.begin("call")
    flow = one.new_flow()
    one.flow_out(span, flow)
    one.flow_in(0, flow)
    assert [(point.kind, point.flow, point.span) for point in read(one).points] == [
        ("out", flow, span),
        ("in", flow, 0),
    ]
    assert flow != one.new_flow()
    assert flow >> 32 != new().new_flow() >> 32


def test_threads_write_without_losing_events() -> None:
    one = new(capacity=1 << 14)
    threads = [threading.Thread(target=lambda: [one.end(one.begin("x")) for _ in range(1000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = read(one)
    assert len(found.spans) == 4000
    assert all(span.end >= span.start for span in found.spans)
    assert len(found.threads) == 4


def test_half_written_and_random_memory_never_breaks_the_reader() -> None:
    one = new()
    for _ in range(2000):
        one.end(one.begin("x", "y", {"a": 1}))
    whole, rng = bytearray(one.memory), random.Random(3)
    for _ in range(200):
        damaged = bytearray(whole)
        for _ in range(50):
            damaged[rng.randrange(ring.HEADER_BYTES, len(damaged))] = rng.randrange(256)
        ring.read(bytes(damaged[: rng.randrange(ring.HEADER_BYTES * 4, len(damaged))]))
    for data in (b"", b"x" * 5000, bytes(8192)):
        with pytest.raises(ValueError, match=r"trace"):
            ring.read(data)


def test_file_of_a_killed_process_has_its_events(tmp_path: Path) -> None:
    path = str(tmp_path / "ring")
    ours, theirs = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.close(ours)
            recorder.start(1000, {"name": "b:1"}, path).begin("never ends")
            os.write(theirs, b"x")
            signal.pause()  # killed here
        finally:
            os._exit(1)
    os.close(theirs)
    os.read(ours, 1)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    os.close(ours)
    found = ring.read(Path(path).read_bytes())
    assert found.process == {"pid": pid, "name": "b:1"}
    assert [(span.name, span.end) for span in found.spans] == [("never ends", -1)]


def test_forked_process_does_not_write_into_the_ring_of_its_parent(untraced: None) -> None:
    one = recorder.start(1000, {})
    pid = os.fork()
    if not pid:
        if recorder.active is None:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    assert recorder.active is one


def test_ring_that_finds_no_room_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        recorder.start(1000, {}, str(tmp_path / "ring"))
    assert list(tmp_path.iterdir()) == []
    assert recorder.active is None


def test_later_recorder_of_a_process_does_not_end_spans_of_the_earlier_one() -> None:
    first = new()
    spans = [first.begin(f"old {n}") for n in range(3)]
    second = new()
    own = [second.begin(f"new {n}") for n in range(3)]
    for span in spans:
        second.end(span)  # the trace was switched off and on meanwhile
    second.end(own[0])
    found = read(second)
    assert (found.fallen_out, found.cut) == (0, 3)
    assert [(span.name, span.end >= 0) for span in found.spans] == [("new 0", True), ("new 1", False), ("new 2", False)]


def test_a_later_recorder_fills_its_ring_from_the_beginning():
    """Whoever reads a ring in slices takes an empty slice for the end of the events."""
    first = new()
    for _ in range(350):
        first.end(first.begin("early"))
    later = new()
    later.end(later.begin("step"))
    used = bytes(later.memory).rstrip(b"\0")
    assert len(used) <= Layout(1024, 64, 16).events_at + 3 * ring.EVENT.size
    assert [span.name for span in ring.read(used + bytes(ring.EVENT.size)).spans] == ["step"]
