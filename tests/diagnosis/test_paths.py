"""The test of a path, over the loopback: both directions are measured, and only who knows the secret takes part."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from rlinf_actors.diagnosis import paths
from rlinf_actors.diagnosis.paths import Listener, measure
from rlinf_actors.wire.check_values import PathTest

SIZE = 3 << 20


@pytest.fixture
def listener() -> Iterator[Listener]:
    found = Listener("127.0.0.1")
    thread = threading.Thread(target=found.serve, args=(SIZE, 1.0))
    thread.start()
    yield found
    found.close()
    thread.join(10)
    assert not thread.is_alive(), "close() ends serve()"


def asked(listener: Listener, secret: bytes | None = None) -> PathTest:
    known = listener.secret if secret is None else secret
    return PathTest("measure", "127.0.0.1", port=listener.port, secret=known, size=SIZE, limit_s=1.0)


def test_both_directions_are_measured(listener: Listener) -> None:
    answer = measure(asked(listener))
    assert answer.fault == ""
    assert (answer.there.size, answer.back.size) == (SIZE, SIZE)
    assert answer.there.seconds > 0 < answer.back.seconds
    assert answer.source == "127.0.0.1"
    assert answer.rtt_s > 0


def test_a_near_end_without_the_secret_is_sent_nothing_and_the_next_is_served(listener: Listener) -> None:
    assert measure(asked(listener, b"wrong")).kind == "failed"
    assert measure(asked(listener)).back.size == SIZE


def test_a_far_end_without_the_secret_gets_no_data(listener: Listener) -> None:
    """Another process may have taken the port since."""
    listener.secret, known = b"another", listener.secret
    answer = measure(asked(listener, known))
    assert (answer.there.size, answer.back.size, answer.kind) == (0, 0, "failed")


def test_a_stranger_that_says_nothing_holds_nobody_up_for_long(listener: Listener, monkeypatch) -> None:
    monkeypatch.setattr(paths, "RTT_S", 1.0)
    with socket.create_connection(("127.0.0.1", listener.port)):
        assert measure(asked(listener)).there.size == SIZE


def test_a_limit_of_time_ends_the_transfer(listener: Listener) -> None:
    test = PathTest("measure", "127.0.0.1", port=listener.port, secret=listener.secret, size=SIZE, limit_s=0.0)
    answer = measure(test)
    assert answer.fault == ""
    assert answer.there.size < SIZE


def test_a_closed_port_is_refused() -> None:
    listener = Listener("127.0.0.1")
    test = asked(listener)
    listener.close()
    assert measure(test).kind == "refused"


def test_a_listener_takes_only_addresses_of_its_machine() -> None:
    with pytest.raises(OSError, match="assign"):
        Listener("192.0.2.1")


def test_no_request_was_heard_where_none_is_left_open(listener: Listener) -> None:
    assert not listener.heard()
