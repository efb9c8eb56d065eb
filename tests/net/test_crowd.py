"""Which connections a listener keeps."""

from __future__ import annotations

import pytest

from rlinf_actors.net.admission import FAIR_S, HANDSHAKE_BYTES, UNPROVED_BYTES, Crowd, Limits, Look, share_of

US, THEM = "10.0.0.1", "10.0.0.2"
PROVED = UNPROVED_BYTES + 1


def make(total: int = 100, newcomers: int = 4, backlog: int = 50, of_address: int = 10) -> Crowd:
    return Crowd(Limits(total, newcomers, backlog, of_address, settled_s=6))


def come(crowd: Crowd, fds: range, host: str = US, now: float = 0.0, proved: bool = False) -> list[str]:
    why = []
    for fd in fds:
        why.append(crowd.came(fd, (host, 1000 + fd), now))
        if proved:
            assert crowd.looked(fd, PROVED, 800) is Look.PROVED
    return why


def surplus(crowd: Crowd, now: float = FAIR_S) -> list[int]:
    """Who goes until there are not too many."""
    went = []
    while (extra := crowd.surplus(now)) is not None:
        went.append(extra.fd)
        crowd.gone(extra.fd)
    return went


def test_as_many_newcomers_as_there_may_be_stay() -> None:
    crowd = make()
    assert come(crowd, range(4)) == [""] * 4
    assert crowd.surplus(FAIR_S) is None


def test_one_too_many_and_the_oldest_goes() -> None:
    crowd = make()
    come(crowd, range(6))
    assert surplus(crowd) == [0, 1]
    assert len(crowd) == 4


def test_who_has_most_of_the_room_gives_up_his_own() -> None:
    crowd = make()
    come(crowd, range(1), US)
    come(crowd, range(1, 50), THEM)
    assert surplus(crowd) == list(range(1, 47))
    assert crowd.newcomer(0) is not None


def test_who_has_proved_himself_is_never_hit() -> None:
    crowd = make()
    come(crowd, range(3), THEM, proved=True)
    come(crowd, range(3, 10), THEM)
    assert surplus(crowd) == [3, 4, 5]
    assert len(crowd) == 3 + 4


def test_the_oldest_may_turn_out_to_have_proved_himself() -> None:
    crowd = make()
    come(crowd, range(5))
    oldest = crowd.surplus(FAIR_S)
    assert oldest is not None
    assert crowd.looked(oldest.fd, PROVED, 0) is Look.PROVED
    assert crowd.surplus(FAIR_S) is None


@pytest.mark.parametrize(
    ("sent", "received", "look"),
    [
        (0, 0, Look.NEW),
        (0, 10, Look.OWED),
        (11, 10, Look.NEW),
        (11, 64, Look.OWED),
        (64, 64, Look.NEW),
        (64, 266, Look.OWED),
        (234, 266, Look.NEW),
        (234, 569, Look.OWED),
    ],
)
def test_whose_turn_it_is_in_the_handshake(sent: int, received: int, look: Look) -> None:
    crowd = make()
    come(crowd, range(1))
    assert crowd.looked(0, sent, received) is look


def test_who_waits_for_us_is_passed_over() -> None:
    crowd = make(newcomers=4)
    come(crowd, range(8))
    for fd in range(8):
        oldest = crowd.surplus(FAIR_S)
        assert oldest is not None
        assert oldest.fd == fd
        assert crowd.looked(fd, 64, 266) is Look.OWED
        crowd.pass_over(fd, FAIR_S)
    assert crowd.surplus(FAIR_S) is None
    assert surplus(crowd, 2 * FAIR_S) == [0, 1, 2, 3]


def test_everybody_has_a_second_first() -> None:
    crowd = make(newcomers=4, backlog=8)
    come(crowd, range(8))
    assert crowd.surplus(0.99 * FAIR_S) is None
    assert surplus(crowd) == [0, 1, 2, 3]


def test_where_that_cannot_be_the_last_one_goes_whomever_it_waits_for() -> None:
    crowd = make(newcomers=4, backlog=8)
    come(crowd, range(9))
    assert crowd.looked(0, 64, 266) is Look.NEW
    assert surplus(crowd, 0.0) == [8]
    come(crowd, range(9, 10), THEM)
    assert surplus(crowd, 0.0) == [7]  # of the address that has most of them


def test_a_newcomer_that_sends_more_than_a_handshake_goes() -> None:
    crowd = make()
    come(crowd, range(1))
    assert crowd.looked(0, 234, HANDSHAKE_BYTES) is Look.OWED
    assert crowd.looked(0, UNPROVED_BYTES, HANDSHAKE_BYTES + 1) is Look.TOO_MUCH


def test_a_member_may_send_as_much_as_it_likes() -> None:
    crowd = make()
    come(crowd, range(1))
    assert crowd.looked(0, PROVED, 1 << 40) is Look.PROVED


def test_where_the_kernel_does_not_say_newcomers_settle_with_time() -> None:
    crowd = make()
    come(crowd, range(4), now=0.0)
    assert crowd.looked(0, 0, 0) is Look.NEW
    come(crowd, range(4, 5), now=6.1)  # libzmq has closed, by now, who had not proved himself
    assert crowd.surplus(FAIR_S) is None
    assert crowd.newcomer(0) is None
    assert len(crowd) == 5


@pytest.mark.parametrize("proved", [True, False])
def test_ends_make_room(proved: bool) -> None:
    crowd = make(of_address=4)
    come(crowd, range(4), proved=proved)
    for fd in range(4):
        crowd.gone(fd)
        crowd.gone(fd)
    assert len(crowd) == 0
    assert come(crowd, range(4), proved=True) == [""] * 4


def test_a_descriptor_that_is_given_again_is_another_connection() -> None:
    crowd = make(of_address=2)
    come(crowd, range(2), proved=True)
    assert crowd.came(1, (THEM, 5), 0.0) == ""  # libzmq did not tell that the first one has ended
    assert crowd.came(2, (US, 6), 0.0) == ""
    newcomer = crowd.newcomer(1)
    assert newcomer is not None
    assert newcomer.peer == (THEM, 5)


def test_an_address_has_its_share_of_members() -> None:
    crowd = make(of_address=3)
    come(crowd, range(3), US, proved=True)
    assert "its address has 3 connections already" in come(crowd, range(3, 4), US)[0]
    assert come(crowd, range(4, 5), THEM) == [""]


def test_members_are_not_closed_for_those_who_come_when_all_is_full() -> None:
    crowd = make(total=5)
    come(crowd, range(5), proved=True)
    assert "LimitNOFILE=" in come(crowd, range(5, 6))[0]
    crowd.gone(5)
    assert crowd.surplus(FAIR_S) is None
    assert len(crowd) == 5


def test_newcomers_have_what_members_leave() -> None:
    crowd = make(total=5)
    come(crowd, range(3), proved=True)
    come(crowd, range(3, 7))
    assert surplus(crowd) == [3, 4]


def test_whose_connections_are_counted_together() -> None:
    assert share_of("10.0.0.1") != share_of("10.0.0.2")
    assert share_of("2001:db8:0:1::1") == share_of("2001:db8:0:1:ffff::2") != share_of("2001:db8:0:2::1")
    assert share_of("fe80::1%eth0") == share_of("fe80::2")
