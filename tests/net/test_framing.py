"""Chunks of messages for one peer: what is packed is unpacked, in order and once. Pure."""

from __future__ import annotations

import pytest

from rlinf_actors.errors import RemoteWireError
from rlinf_actors.net.framing import BIG, FULL, MESSAGES, headers, pack, unpack


def test_messages_of_several_chunks_arrive_in_order_and_once():
    messages = [(b"%d" % n, [bytes([n]) * (FULL // 3 if n % 2 else 10)] * (n % 3)) for n in range(20)]
    small = [(header, [part[: BIG - 1] for part in parts]) for header, parts in messages] * 40
    for wanted in (messages, small):
        found, start, chunks = [], 0, 0
        while start < len(wanted):
            records, big, start = pack(wanted, start)
            found += [(header, [bytes(part) for part in parts]) for header, parts in unpack(records, big)]
            chunks += 1
            assert chunks <= len(wanted)
        assert found == wanted
    assert chunks > 1


def test_messages_without_parts_are_read_one_by_one():
    wanted = [bytes([n % 256]) * size for n, size in enumerate((0, 1, 31, 255, 256, 65535, 65536, *[5] * 20))]
    for messages in (wanted, wanted[:15], [], [b"x"] * MESSAGES):
        assert list(headers(pack([(message, ()) for message in messages])[0])) == messages


def test_message_with_a_part_is_refused_where_none_may_be():
    read = headers(pack([(b"first", ()), (b"second", [b"part"])])[0])
    assert next(read) == b"first"
    with pytest.raises(RemoteWireError):
        next(read)
