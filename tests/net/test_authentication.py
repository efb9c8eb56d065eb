"""The ZAP handler's replies."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import pytest
import zmq
from keyed_kit import ListGate
from zmq.utils import z85

from rlinf_actors.net.authentication import BATCH, ENDPOINT, ZapHandler, judge
from rlinf_actors.net.connection_guard import RejectionBatch
from rlinf_actors.net.curve import why_rejected
from rlinf_actors.security.keypair import KeyPair

DOMAIN = "rlinf-actors.1"


def request(*credentials: bytes, domain: bytes = DOMAIN.encode(), mechanism: bytes = b"CURVE") -> list[bytes]:
    return [b"1.0", b"7", domain, b"10.0.0.9", b"", mechanism, *credentials]


def code(frames: list[bytes], gate: ListGate) -> bytes:
    reply = judge(frames, {DOMAIN: gate}).reply
    assert len(reply) == 6
    assert reply[0] == b"1.0"
    assert reply[4] == b"" or reply[2] == b"200"  # a rejected peer gets no user id
    return reply[2]


def test_a_listed_key_gets_its_user_id() -> None:
    gate = ListGate()
    pair = gate.enlist()
    verdict = judge(request(z85.decode(pair.public)), {DOMAIN: gate})
    assert verdict.reply == [b"1.0", b"7", b"200", b"", pair.public.encode(), b""]


def test_rejection_names_key_and_address() -> None:
    stranger = KeyPair.make()
    verdict = judge(request(z85.decode(stranger.public)), {DOMAIN: ListGate()})
    assert verdict.reply[1:3] == [b"7", b"400"]
    assert (verdict.key, verdict.address, verdict.why) == (stranger.public, "10.0.0.9", "")


@pytest.mark.parametrize("mechanism", [b"NULL", b"PLAIN", b"GSSAPI", b""])
def test_mechanisms_other_than_curve_are_refused(mechanism: bytes) -> None:
    gate = ListGate()
    key = z85.decode(gate.enlist().public)
    assert code(request(key, mechanism=mechanism), gate) == b"400"
    assert code(request(mechanism=mechanism), gate) == b"400"


@pytest.mark.parametrize("domain", [b"", b"rlinf-actors.10", b"rlinf-actors", b"*", b"\xff"])
def test_only_the_exact_domain_is_served(domain: bytes) -> None:
    gate = ListGate()
    assert code(request(z85.decode(gate.enlist().public), domain=domain), gate) == b"400"


def test_malformed_requests_are_refused() -> None:
    gate = ListGate()
    key = z85.decode(gate.enlist().public)
    good = request(key)
    assert code(good, gate) == b"200"
    for size in range(len(good) - 1):
        assert code(good[:size], gate) == b"500"
    assert code(good[:6], gate) == b"400"  # no credentials
    assert code([b"2.0", *good[1:]], gate) == b"500"
    assert code([*good, b"more"], gate) == b"400"
    for wrong in (b"", key[:31], key + b"x", b"\0" * 32, b"\xff" * 32):
        assert code(request(wrong), gate) == b"400"


class BrokenGate(ListGate):
    def admit(self, public_key: str) -> None:
        raise RuntimeError("a bug")


async def test_failing_gate_refuses_the_request_and_the_next_one_is_answered(
    rlinf_leak_check, caplog: pytest.LogCaptureFixture
) -> None:
    loop = asyncio.get_running_loop()
    context = zmq.Context()
    handler = ZapHandler(context, loop)
    handler.serve("broken", BrokenGate())
    handler.serve("good", good := ListGate())
    asking = context.socket(zmq.REQ)
    asking.setsockopt(zmq.LINGER, 0)
    try:
        asking.connect(ENDPOINT)
        key = z85.decode(good.enlist().public)
        replies = []
        for frames in (request(key, domain=b"broken"), request(key, domain=b"good"), [b"nonsense"]):
            asking.send_multipart(frames)
            assert await loop.run_in_executor(None, asking.poll, 10_000)
            replies.append(asking.recv_multipart()[2])
        asking.send_multipart(request(key, domain=b"unknown"))
        assert await loop.run_in_executor(None, asking.poll, 10_000)
        replies.append(asking.recv_multipart()[2])
    finally:
        asking.close()
        handler.close()
        context.term()
    assert replies == [b"500", b"200", b"500", b"400"]
    assert "deciding about a connection failed" in caplog.text
    assert "a malformed request" in caplog.text


@contextlib.contextmanager
def handler_with_requests(times: int) -> Iterator[tuple[ZapHandler, zmq.Socket[bytes]]]:
    """A handler with *times* waiting requests, and the socket that gets its replies."""
    context = zmq.Context()
    handler = ZapHandler(context, asyncio.get_running_loop())
    handler.serve(DOMAIN, gate := ListGate())
    frames = request(z85.decode(gate.enlist().public))
    asking = context.socket(zmq.DEALER)
    asking.setsockopt(zmq.LINGER, 0)
    try:
        asking.connect(ENDPOINT)
        for _ in range(times):
            asking.send_multipart([b"", *frames])
        yield handler, asking
    finally:
        asking.close()
        handler.close()
        context.term()


async def test_many_requests_are_answered_in_batches_over_several_loop_turns(rlinf_leak_check) -> None:
    with handler_with_requests(2 * BATCH + 1) as (handler, asking):
        handler._drain()
        assert read_answers(asking) == BATCH
        got = BATCH
        while got < 2 * BATCH + 1:  # in later turns, without another event of the socket's FD
            await asyncio.sleep(0)
            got += read_answers(asking)


async def test_repeated_wakeups_do_not_lengthen_later_turns(rlinf_leak_check) -> None:
    with handler_with_requests(16 * BATCH) as (handler, asking):
        for _ in range(8):
            handler._drain()
        assert read_answers(asking) == 8 * BATCH
        await asyncio.sleep(0)
        assert read_answers(asking) <= 2 * BATCH  # the rest of one turn, and one more event


def read_answers(asking: zmq.Socket[bytes]) -> int:
    """Receive all waiting replies and return their number."""
    count = 0
    while asking.poll(0):
        assert asking.recv_multipart()[3] == b"200"
        count += 1
    return count


async def test_failed_handshakes_are_reported_once_a_turn_with_their_number() -> None:
    tally = RejectionBatch(gate := ListGate(), asyncio.get_running_loop())
    for _ in range(1000):
        tally.note("", why_rejected(int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)))
    tally.note("", why_rejected(12345))
    assert gate.refused.all == []
    await gate.refused.until(2)
    assert gate.refused.all == [("", "", "it came without a key", 1000), ("", "", "its handshake was malformed", 1)]
