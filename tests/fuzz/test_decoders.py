"""Arbitrary bytes: each decoder decodes them, or raises the expected exception, in bounded memory."""

from __future__ import annotations

import random
import tracemalloc

import msgspec
import pace
import pytest
from decoders import DECODERS, mutated
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lies import Liar

from rlinf_actors.errors import UsageError
from rlinf_actors.net.link import LogThrottle
from rlinf_actors.wire import control_codec, frames
from tests.message_bounds import beyond

ROUNDS = 500 * pace.rounds
each = pytest.mark.parametrize("name", DECODERS)


@each
@given(data=st.binary(max_size=300))
@example(data=b"")
@example(data=b"\xc1")
@example(data=b"\x91" * 100_000)
@example(data=b"\x81\xa1a" * 50_000)
@example(data=b"\xdd\xff\xff\xff\xff")
@example(data=b"\xc6\x7f\xff\xff\xff")
@settings(max_examples=20 * pace.rounds)
def test_any_bytes_are_decoded_or_refused(name, data):
    DECODERS[name].check(data)


@pytest.mark.model
@each
def test_changed_messages_are_decoded_or_refused(name):
    decoder, choose = DECODERS[name], random.Random(1)
    taken = sum(decoder.check(mutated(decoder, choose)) for _ in range(ROUNDS))
    assert taken < ROUNDS, "no changed message was refused"


@each
def test_truncated_messages_are_decoded_or_refused(name):
    decoder = DECODERS[name]
    for seed in decoder.seeds[:40]:
        step = max(1, len(seed) // 50)
        for length in range(0, len(seed), step):
            decoder.check(seed[:length])


@each
def test_most_seeds_are_valid_messages(name):
    decoder = DECODERS[name]
    taken = sum(map(decoder.check, decoder.seeds))
    assert taken * 2 > len(decoder.seeds) or taken > 20, f"{taken} of {len(decoder.seeds)} are messages"


LONG = 1 << 18
ARRAY = b"\xdd" + LONG.to_bytes(4, "big")
ENDLESS = b"\xdd\xff\xff\xff\xff"
WATCH = b"\x82\xa4type\xa3not\xa4body\x82\xa4type\xacWatchClients\xacincarnations"
GREEDY = {
    "empty records": ("chunk", ARRAY + b"\x90" * LONG),
    "short records": ("chunk", ARRAY + b"\x91\xc4\x00" * LONG),
    "small parts": ("chunk", b"\x91" + ARRAY + b"\x00" * LONG),
    "endless chunk": ("chunk", ENDLESS),
    "endless parts": ("chunk", b"\x91" + ENDLESS + b"\xc4\x00" * LONG),
    "many numbers": ("header", b"\x92\x0b" + ARRAY + b"\x00" * LONG),
    "endless numbers": ("header", b"\x92\x0b" + ENDLESS + b"\x00" * LONG),
    "empty names": ("control", WATCH + ARRAY + b"\xa0" * LONG),
    "endless names": ("control", WATCH + ENDLESS + b"\xa0" * LONG),
    "short names": ("control", WATCH + ARRAY + b"\xa2ab" * LONG),
    "empty rows": ("bulk", b"\x94\x00\x01" + ARRAY + b"\x92\x00\x01" * LONG + b"\xc4\x00"),
    "endless rows": ("bulk", b"\x94\x00\x01" + ENDLESS + b"\x92\x00\x01" * LONG),
    "endless transfers": ("bulk", b"\x92\x03" + ENDLESS + b"\x00" * LONG),
    "empty structs": ("to_agent", b"\x82\xa4type\xa6Pulses\xa5pongs" + ARRAY + b"\x81\xa2id\xa0" * LONG),
}


@pytest.mark.parametrize("case", GREEDY)
def test_memory_is_bounded_by_the_size_of_a_message(case):
    name, data = GREEDY[case]
    tracemalloc.start(1)
    try:
        before = tracemalloc.get_traced_memory()[0]
        DECODERS[name].check(data)
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert peak < 32 * len(data) + (1 << 20)


@pytest.mark.model
@pytest.mark.parametrize("kind", [control_codec.Request, control_codec.Notice, frames.AnyFrame])
def test_longest_values_are_decoded_and_longer_ones_refused(kind):
    """Messages with values as long as the table of bounds (wire.bounds) allows, and one longer."""
    decode = msgspec.msgpack.Decoder(kind).decode
    taken = refused = 0
    for seed in range(40 * pace.rounds):
        data = Liar(seed, extremes=0.1).say(kind)
        try:
            assert not beyond(kind, decode(data))
            taken += 1
        except msgspec.ValidationError as error:
            refused += "of length <=" in str(error)
        except UsageError:  # of a value that checks itself, such as a RestartPolicy
            continue
    assert taken
    assert refused


def test_dropped_messages_are_logged_at_powers_of_two():
    tally = LogThrottle()
    assert [n for n in range(1, 1001) if tally.note()] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    assert tally.count == 1000
