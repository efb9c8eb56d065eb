"""The head's inbox: which messages pass before others, and what a member that floods it gets."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest

from rlinf_actors.errors import RemoteWireError
from rlinf_actors.net import fair_inbox
from rlinf_actors.net.fair_inbox import FairInbox
from rlinf_actors.net.framing import pack
from rlinf_actors.net.link import HeldBack, Verbs
from rlinf_actors.net.rpc import BEATS, STOPS, URGENT
from rlinf_actors.wire.agent_messages import Beat, Goodbye
from rlinf_actors.wire.client_messages import EStop, GetStatus, StopGroup
from rlinf_actors.wire.control_codec import Body, Notice, Request, decode, encode, verb_of


class Frame:
    """Stands in for a received zmq.Frame."""

    def __init__(self, data: bytes) -> None:
        self.bytes = self.buffer = data

    def __len__(self) -> int:
        return len(self.bytes)


class Kit:
    """An inbox with a clock that advances by *cost* with each message. Keeps what was handled, refused and closed."""

    def __init__(self, monkeypatch: Any) -> None:
        self.now, self.cost = 100.0, fair_inbox.TURN_S
        monkeypatch.setattr(fair_inbox, "clock", lambda: self.now)
        self.refused: list[tuple[bytes, str]] = []
        self.closed: list[bytes] = []
        self.warned: list[bytes] = []
        self.held_back, self.woken = HeldBack(), 0
        refuse = lambda peer, message, why: self.refused.append((peer, why))  # noqa: E731
        verbs = Verbs(verb_of, STOPS, URGENT, refuse, BEATS, self.held_back)
        self.inbox = FairInbox(verbs, self, self._wake)  # type: ignore[arg-type]
        self.handled: list[str] = []

    def _wake(self) -> None:
        self.woken += 1

    def is_closing(self, peer: bytes, frame: Frame) -> bool:
        return peer in self.closed

    def close(self, peer: bytes, key: str, why: str) -> None:
        self.closed.append(peer)

    def send(self, peer: str, *bodies: Body, key: str | None = None, times: int = 1) -> None:
        kinds = [Notice(body) if isinstance(body, (Beat, Goodbye)) else Request(1, body) for body in bodies]
        chunk = pack([(encode(kind), ()) for kind in kinds] * times)[0]
        self.raw(peer, chunk, key)

    def raw(self, peer: str, chunk: bytes, key: str | None = None) -> None:
        self.inbox.add(peer.encode(), peer if key is None else key, Frame(chunk), [])  # type: ignore[arg-type]

    def _handle(self, peer: bytes, message: bytes, parts: list) -> None:
        self.now += self.cost
        self.handled.append(f"{peer.decode()} {type(decode(message).body).__name__}")  # type: ignore[union-attr]

    def turn(self, turns: int = 1) -> list[str]:
        """Let turns of the loop pass; return what was handled in them."""
        self.handled = []
        for _ in range(turns):
            self.inbox.serve(self._handle, lambda peer, error: self.warned.append(peer))
        return self.handled


@pytest.fixture
def kit(monkeypatch: pytest.MonkeyPatch) -> Kit:
    return Kit(monkeypatch)


def test_beat_passes_before_requests_of_others(kit: Kit) -> None:
    for peer in "abcdefgh":
        kit.send(peer, GetStatus(), times=1000)
    kit.send("node", Beat("i"))
    assert kit.turn() == ["node Beat"]


def test_emergency_stop_passes_before_beats_and_its_own_connection(kit: Kit) -> None:
    kit.send("bad", Beat("i"))
    kit.send("driver", *[GetStatus()] * 10)
    kit.send("driver", GetStatus(), EStop("me"))
    assert kit.turn(2) == ["driver EStop", "bad Beat"]


def test_end_does_not_overtake_what_its_connection_sent_before(kit: Kit) -> None:
    kit.send("other", GetStatus(), times=1000)
    kit.send("driver", GetStatus(), StopGroup("ns", "g", 0.0))
    kit.send("gone", Goodbye())
    handled = kit.turn(5)
    assert handled[0] == "gone Goodbye"
    assert [what for what in handled if what.startswith("driver")] == ["driver GetStatus", "driver StopGroup"]


def test_flood_of_beats_does_not_delay_other_requests(kit: Kit) -> None:
    kit.cost = fair_inbox.TURN_S / 10
    for _ in range(fair_inbox.URGENT_S * 2):
        for peer in "ab":
            kit.send(f"{peer}{_}", Beat("i"), key=peer)
    kit.send("victim", GetStatus())
    handled = kit.turn(1000)
    assert len(handled) == 4 * fair_inbox.URGENT_S + 1
    assert handled.index("victim GetStatus") <= 2 * fair_inbox.URGENT_S + 3


def test_member_with_a_long_queue_waits_for_itself_only(kit: Kit) -> None:
    for _ in range(5):
        kit.send("bad", GetStatus(), times=60_000)
    kit.turn(50)
    for _ in range(20):
        kit.send("victim", GetStatus())
        assert "victim GetStatus" in kit.turn(2)


def test_member_beyond_its_bytes_is_refused_and_its_heavy_connections_closed(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fair_inbox, "HELD_BYTES", 100_000)
    kit.send("worker", GetStatus(), key="job")
    while not kit.refused:
        kit.send("bad", GetStatus(), key="job", times=500)
    assert "wait to be handled by the head, the most of one process" in kit.refused[0][1]
    assert kit.closed == [b"bad"]
    kit.send("bad", GetStatus(), key="job")
    kit.send("other", GetStatus())
    assert sorted(kit.turn(5)) == ["other GetStatus", "worker GetStatus"]


def test_other_connections_of_a_member_beyond_its_bytes_lose_nothing(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_inbox, "HELD_BYTES", 100_000)
    while kit.inbox._others.held("job") < 90_000:
        kit.send("bad", GetStatus(), key="job", times=200)
    kit.send("worker", *[GetStatus()] * 400, key="job")
    assert (kit.closed, kit.refused) == ([b"bad"], [])
    kit.cost = 0.0
    assert kit.turn() == ["worker GetStatus"] * 400


def test_member_pays_for_the_slices_of_its_messages(kit: Kit) -> None:
    for peer in ("long", "other"):
        kit.send(peer, GetStatus(), times=1000)
    kit.turn(2)
    kit.held_back.on_work("long", 10 * fair_inbox.TURN_S)
    handled = kit.turn(20)
    assert 4 <= handled.count("long GetStatus") <= 6


def test_local_processes_have_no_limit_of_bytes(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_inbox, "HELD_BYTES", 1000)
    for _ in range(3):
        kit.send("local", GetStatus(), key="", times=500)
    assert (kit.refused, kit.closed) == ([], [])


def test_malformed_chunk_is_dropped_from_its_fault_on(kit: Kit) -> None:
    good = pack([(encode(Request(1, GetStatus())), ())] * 200)[0]
    with pytest.raises(RemoteWireError):
        kit.raw("bad", b"\x93garbage")
    kit.raw("bad", good[:-1])
    kit.cost = 0.0
    assert (len(kit.turn()), kit.warned) == (199, [b"bad"])


def test_long_message_is_not_copied_before_its_turn(monkeypatch):
    """Else the head copies 8 MiB for each connection of a flood before it serves anybody."""
    kit = Kit(monkeypatch)
    chunk = pack([(b"x" * (4 << 20), ())])[0]
    tracemalloc.start()
    frame = Frame(chunk)
    frame.buffer = memoryview(chunk)  # type: ignore[assignment]
    kit.inbox.add(b"a", "a", frame, [])  # type: ignore[arg-type]
    added = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert added < 100_000
    handled: list[bytes] = []
    kit.inbox.serve(lambda peer, message, parts: handled.append(message), lambda peer, error: None)
    assert handled == [b"x" * (4 << 20)]
    assert type(handled[0]) is bytes


def test_connection_that_is_held_back_waits_except_for_its_beats(kit: Kit) -> None:
    kit.cost = 0.0
    kit.held_back.hold(b"busy")
    kit.send("busy", GetStatus(), Beat("i"), key="job")
    kit.send("busy", Goodbye(), key="job")
    assert kit.turn(2) == ["busy Beat"]
    kit.send("other", GetStatus(), key="job")
    assert kit.turn(2) == ["other GetStatus"]
    assert not kit.inbox.busy
    assert kit.woken == 0
    kit.held_back.release(b"busy")
    assert kit.woken == 1
    assert kit.turn(2) == ["busy GetStatus", "busy Goodbye"]
    kit.send("busy", GetStatus(), key="job")
    assert kit.turn() == ["busy GetStatus"]


def test_what_waits_of_a_connection_that_is_held_back_has_a_bound(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_inbox, "HELD_BYTES", 100_000)
    kit.held_back.hold(b"busy")
    while not kit.refused:
        kit.send("busy", GetStatus(), times=500)
        kit.turn()
    assert kit.closed == [b"busy"]
    kit.held_back.release(b"busy")
    assert kit.turn() == []
