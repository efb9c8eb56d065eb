"""Limits of a listener's connections."""

from __future__ import annotations

import pytest

from rlinf_actors.net.admission import (
    FAIR_S,
    HANDSHAKE_BYTES,
    PENDING_BYTES,
    ConnectionTable,
    Handshake,
    Limits,
    share_of,
)

US, THEM = "10.0.0.1", "10.0.0.2"
DONE = PENDING_BYTES + 1


def make(total: int = 100, pending: int = 4, backlog: int = 50, per_address: int = 10) -> ConnectionTable:
    return ConnectionTable(Limits(total, pending, backlog, per_address, settled_s=6))


def accept(table: ConnectionTable, fds: range, host: str = US, now: float = 0.0, done: bool = False) -> list[str]:
    why = []
    for fd in fds:
        why.append(table.accepted(fd, (host, 1000 + fd), now))
        if done:
            assert table.progress(fd, DONE, 800) is Handshake.DONE
    return why


def evict(table: ConnectionTable, now: float = FAIR_S) -> list[int]:
    """Evict until not too many are pending; return the descriptors."""
    went = []
    while (extra := table.to_evict(now)) is not None:
        went.append(extra.fd)
        table.closed(extra.fd)
    return went


def test_pending_connections_within_the_limit_stay() -> None:
    table = make()
    assert accept(table, range(4)) == [""] * 4
    assert table.to_evict(FAIR_S) is None


def test_oldest_pending_connections_beyond_the_limit_are_evicted() -> None:
    table = make()
    accept(table, range(6))
    assert evict(table) == [0, 1]
    assert len(table) == 4


def test_a_flooding_address_evicts_its_own_connections() -> None:
    table = make()
    accept(table, range(1), US)
    accept(table, range(1, 50), THEM)
    assert evict(table) == list(range(1, 47))
    assert table.pending(0) is not None


def test_established_connections_are_never_evicted() -> None:
    table = make()
    accept(table, range(3), THEM, done=True)
    accept(table, range(3, 10), THEM)
    assert evict(table) == [3, 4, 5]
    assert len(table) == 3 + 4


def test_a_candidate_whose_handshake_is_done_stays() -> None:
    table = make()
    accept(table, range(5))
    oldest = table.to_evict(FAIR_S)
    assert oldest is not None
    assert table.progress(oldest.fd, DONE, 0) is Handshake.DONE
    assert table.to_evict(FAIR_S) is None


@pytest.mark.parametrize(
    ("sent", "received", "state"),
    [
        (0, 0, Handshake.PENDING),
        (0, 10, Handshake.OURS),
        (11, 10, Handshake.PENDING),
        (11, 64, Handshake.OURS),
        (64, 64, Handshake.PENDING),
        (64, 266, Handshake.OURS),
        (234, 266, Handshake.PENDING),
        (234, 569, Handshake.OURS),
    ],
)
def test_byte_counts_show_the_state_of_the_handshake(sent: int, received: int, state: Handshake) -> None:
    table = make()
    accept(table, range(1))
    assert table.progress(0, sent, received) is state


def test_a_connection_that_waits_for_our_handshake_is_spared() -> None:
    table = make(pending=4)
    accept(table, range(8))
    for fd in range(8):
        oldest = table.to_evict(FAIR_S)
        assert oldest is not None
        assert oldest.fd == fd
        assert table.progress(fd, 64, 266) is Handshake.OURS
        table.spare(fd, FAIR_S)
    assert table.to_evict(FAIR_S) is None
    assert evict(table, 2 * FAIR_S) == [0, 1, 2, 3]


def test_connections_are_not_evicted_in_their_first_second() -> None:
    table = make(pending=4, backlog=8)
    accept(table, range(8))
    assert table.to_evict(0.99 * FAIR_S) is None
    assert evict(table) == [0, 1, 2, 3]


def test_newest_connection_beyond_the_backlog_is_evicted_at_once() -> None:
    table = make(pending=4, backlog=8)
    accept(table, range(9))
    assert table.progress(0, 64, 266) is Handshake.PENDING
    assert evict(table, 0.0) == [8]
    accept(table, range(9, 10), THEM)
    assert evict(table, 0.0) == [7]  # of the address with most connections


def test_a_pending_connection_that_floods_is_closed() -> None:
    table = make()
    accept(table, range(1))
    assert table.progress(0, 234, HANDSHAKE_BYTES) is Handshake.OURS
    assert table.progress(0, PENDING_BYTES, HANDSHAKE_BYTES + 1) is Handshake.FLOODED


def test_an_established_connection_may_send_any_amount() -> None:
    table = make()
    accept(table, range(1))
    assert table.progress(0, DONE, 1 << 40) is Handshake.DONE


def test_without_tcp_info_connections_settle_with_time() -> None:
    table = make()
    accept(table, range(4), now=0.0)
    assert table.progress(0, 0, 0) is Handshake.PENDING
    accept(table, range(4, 5), now=6.1)  # by now libzmq itself has closed connections without a handshake
    assert table.to_evict(FAIR_S) is None
    assert table.pending(0) is None
    assert len(table) == 5


@pytest.mark.parametrize("done", [True, False])
def test_closed_connections_make_room(done: bool) -> None:
    table = make(per_address=4)
    accept(table, range(4), done=done)
    for fd in range(4):
        table.closed(fd)
        table.closed(fd)
    assert len(table) == 0
    assert accept(table, range(4), done=True) == [""] * 4


def test_a_reused_descriptor_is_another_connection() -> None:
    table = make(per_address=2)
    accept(table, range(2), done=True)
    assert table.accepted(1, (THEM, 5), 0.0) == ""  # libzmq did not report the first one's end
    assert table.accepted(2, (US, 6), 0.0) == ""
    connection = table.pending(1)
    assert connection is not None
    assert connection.peer == (THEM, 5)


def test_an_address_has_a_limit_of_established_connections() -> None:
    table = make(per_address=3)
    accept(table, range(3), US, done=True)
    assert "its address has 3 connections already" in accept(table, range(3, 4), US)[0]
    assert accept(table, range(4, 5), THEM) == [""]


def test_a_full_listener_closes_the_new_connection() -> None:
    table = make(total=5)
    accept(table, range(5), done=True)
    assert "LimitNOFILE=" in accept(table, range(5, 6))[0]
    table.closed(5)
    assert table.to_evict(FAIR_S) is None
    assert len(table) == 5


def test_established_connections_reduce_the_room_for_pending_ones() -> None:
    table = make(total=5)
    accept(table, range(3), done=True)
    accept(table, range(3, 7))
    assert evict(table) == [3, 4]


def test_ipv6_connections_count_by_network() -> None:
    assert share_of("10.0.0.1") != share_of("10.0.0.2")
    assert share_of("2001:db8:0:1::1") == share_of("2001:db8:0:1:ffff::2") != share_of("2001:db8:0:2::1")
    assert share_of("fe80::1%eth0") == share_of("fe80::2")
