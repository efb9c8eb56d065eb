"""Chunks of messages for one peer: what is packed is unpacked, in order and once. Pure."""

from __future__ import annotations

from rlinf_actors.net.framing import BIG, FULL, pack, unpack


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
