"""A signal handler that raises in the middle of an operation: that one may have been done or not, later ones work."""

from __future__ import annotations

import contextlib
import itertools
import random
import signal
from collections.abc import Callable
from typing import Any

import pace
import pytest

from rlinf_actors import CallTimeoutError, Channel, Cluster, NodePlacementStrategy, Worker

pytestmark = [
    pytest.mark.live,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # raised in a __del__
]
SOON_S = 0.00002
LAST = "last"


class Interrupted(Exception):
    """As of a user's time limit."""


def interrupt(operation: Callable[[], object], times: int, most_s: float) -> None:
    """Call *operation* until a signal handler has raised so many times in it, within *most_s* seconds."""
    chance, left = random.Random(times), times

    def raises(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, raises)
    try:
        while left:
            try:
                try:
                    signal.setitimer(signal.ITIMER_REAL, chance.uniform(SOON_S, most_s))
                    operation()
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except Interrupted:
                left -= 1
            except CallTimeoutError:
                continue
            except Exception as error:
                if not isinstance(error.__cause__, Interrupted):  # while a value was pickled
                    raise
                left -= 1
    finally:
        signal.signal(signal.SIGALRM, before)


class Talker(Worker):
    def echo(self, value: Any) -> Any:
        return value

    def send_interrupted(self, to: str, times: int) -> None:
        interrupt(lambda: self.send(1, to, 0), times, 0.0003)
        self.send(LAST, to, 0)

    def receive_interrupted(self, of: str, times: int) -> None:
        interrupt(lambda: self.recv(of, 0, timeout=0.002), times, 0.002)

    def receive_to_the_last(self, of: str) -> None:
        while self.recv(of, 0, timeout=pace.PATIENCE_S) != LAST:
            pass

    def send_all(self, to: str, values: list[Any]) -> None:
        for value in values:
            self.send(value, to, 0)


@pytest.fixture
def times(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("interruptions"))


def launch(cluster: Cluster, name: str) -> Any:
    return Talker.create_group().launch(cluster, NodePlacementStrategy([0]), name=name)


@pytest.mark.parametrize("local", [False, True], ids=["", "local"])
def test_put(cluster, times, local):
    with contextlib.closing(Channel.create("puts", local=local)) as channel:
        turns = itertools.cycle([True, False])
        interrupt(lambda: channel.put(1, async_op=next(turns)), times, 0.00005 if local else 0.0008)
        channel.put(LAST)
        while channel.get(timeout=pace.PATIENCE_S) != LAST:
            pass


@pytest.mark.parametrize("local", [False, True], ids=["", "local"])
def test_get(cluster, times, local):
    with contextlib.closing(Channel.create("gets", local=local)) as channel:
        interrupt(lambda: (channel.put(1), channel.get(timeout=0.01)), times, 0.00005 if local else 0.0008)
        channel.put(LAST)
        while channel.get(timeout=pace.PATIENCE_S) != LAST:
            pass


def test_send(cluster, times):
    talker, other = launch(cluster, "talker"), launch(cluster, "other")
    received = other.receive_to_the_last("talker")
    talker.send_interrupted("other", times).wait()
    received.wait()


def test_recv(cluster, times):
    talker, other = launch(cluster, "talker"), launch(cluster, "other")
    talker.send_all("other", list(range(times)))
    other.receive_interrupted("talker", times).wait()
    talker.send_all("other", [LAST])
    other.receive_to_the_last("talker").wait()


@pytest.mark.parametrize("waits", [False, True], ids=["call", "wait"])
def test_call(cluster, times, waits):
    talker = launch(cluster, "talker")
    interrupt(lambda: talker.echo(1).wait() if waits else talker.echo(1), times, 0.0008)
    assert talker.echo(2).wait(pace.PATIENCE_S) == [2]


def test_launch(cluster, times):
    names = (f"talker{n}" for n in itertools.count())
    interrupt(lambda: launch(cluster, next(names)).shutdown(), times // 10, 0.06)
    assert launch(cluster, "talker").echo(2).wait(pace.PATIENCE_S) == [2]
