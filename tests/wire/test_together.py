"""Calls and results that travel as one frame: what `joined` makes of them is the same calls and results, in order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rlinf_actors.wire import frames
from rlinf_actors.wire.together import MOST_BYTES, joined

PART = b"M\x01"


def opened(messages):
    """Each call and result in *messages*, with its parts, and all else as it is."""
    found = []
    for header, parts in messages:
        assert type(header) is bytes
        frame = frames.decode(header)
        if isinstance(frame, frames.Calls):
            each = [[part] for part in parts] or [[]] * len(frame.ids)
            calls = (frames.Call(id, frame.method, frame.deadline_s) for id in frame.ids)
            found += zip(calls, each, strict=True)
        elif isinstance(frame, frames.Oks):
            each = [[part] for part in parts] or [[]] * len(frame.ids)
            found += zip(map(frames.Ok, frame.ids, frame.seconds), each, strict=True)
        else:
            found.append((frame, list(parts)))
    return found


calls = st.builds(frames.Call, st.integers(1, 99), st.sampled_from(["step", "stop"]), st.sampled_from([0.0, 2.5]))
oks = st.builds(frames.Ok, st.integers(1, 99), st.sampled_from([0.0, 0.5]))
others = st.builds(frames.Cancel, st.integers(1, 99))
parts = st.lists(st.just(PART), max_size=1)


@given(st.lists(st.tuples(st.one_of(calls, calls, oks, oks, others), parts), max_size=40))
def test_joined_messages_are_the_same_calls_results_and_others_in_order(sent):
    given_headers = [(frames.encode(frame) if isinstance(frame, frames.Cancel) else frame, own) for frame, own in sent]
    assert opened(joined(given_headers)) == [(frame, list(own)) for frame, own in sent]


def test_a_burst_is_one_message():
    assert len(joined([(frames.Call(n, "step"), ()) for n in range(1000)])) == 1
    assert len(joined([(frames.Ok(n, 0.1), [PART]) for n in range(1000)])) == 1


def test_a_frame_has_no_more_than_its_limits():
    sizes = [len(frames.decode(header).ids) for header, _ in joined([(frames.Ok(n), ()) for n in range(3000)])]
    assert max(sizes) == frames.MAX_TOGETHER
    assert sum(sizes) == 3000
    large = joined([(frames.Call(n, "step"), [bytes(MOST_BYTES // 2)]) for n in range(8)])
    assert [len(parts) for _, parts in large] == [2] * 4
