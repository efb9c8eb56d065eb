"""Signals strike while the main thread sends; and whose handlers are never replaced."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
from collections.abc import Callable

import net_kit
import pytest

from rlinf_actors.net import held_signals
from rlinf_actors.net.link import LinkOptions
from rlinf_actors.net.local_network import LocalNetwork
from rlinf_actors.net.loop import IoThread


class Struck(Exception):
    pass


def strike(number: int, frame: object) -> None:
    raise Struck


@pytest.fixture(autouse=True)
def handler():
    before = signal.signal(signal.SIGUSR1, strike)
    yield
    signal.signal(signal.SIGUSR1, before)


class StrikingLock:
    """A lock in whose acquiring a signal arrives."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.locked, self.release = self._lock.locked, self._lock.release

    def acquire(self, *args: object, **options: object) -> bool:
        acquired = self._lock.acquire(*args, **options)
        if threading.current_thread() is threading.main_thread():
            os.kill(os.getpid(), signal.SIGUSR1)
        return acquired

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def test_signal_that_strikes_a_sending_thread_loses_no_message(tmp_path) -> None:
    io = IoThread("io")
    network = LocalNetwork(io.loop)

    def on_loop(function: Callable[..., object], *args: object, **options: object):
        async def call() -> object:
            return function(*args, **options)

        return io.submit(call()).result(10)

    async def heard(count: int) -> None:
        await inbox.until(count)

    inbox = on_loop(net_kit.Inbox)
    listener = on_loop(network.listener, lambda *message: listener.admit(message[0]) or inbox(*message))
    endpoint = on_loop(listener.bind, f"ipc://{tmp_path}/w")
    link = on_loop(network.link, endpoint, b"me", lambda *_: None, LinkOptions(to="g:0"))
    link._lock = StrikingLock()
    release = threading.Event()
    io.loop.call_soon_threadsafe(release.wait)  # the messages of others wait
    for n in range(3):
        link.send(b"%d" % n)
    with pytest.raises(Struck):
        link.send(b"3", now=True)
    release.set()
    for n in range(4, 6):
        with contextlib.suppress(Struck):
            link.send(b"%d" % n, now=True)
    io.submit(heard(6)).result(10)
    assert inbox.headers == [b"%d" % n for n in range(6)]
    on_loop(network.close)
    io.stop()


def test_handler_of_a_library_stays(tmp_path) -> None:
    with open(tmp_path / "trace", "w+") as trace:
        faulthandler.register(signal.SIGUSR1, trace)
        held_signals.main.hold()
        held_signals.main.release()
        os.kill(os.getpid(), signal.SIGUSR1)
        faulthandler.unregister(signal.SIGUSR1)
        assert "test_handler_of_a_library_stays" in (tmp_path / "trace").read_text()


def test_flags_of_the_user_stay() -> None:
    signal.siginterrupt(signal.SIGUSR1, False)
    before = held_signals._action_of(signal.SIGUSR1)
    held_signals.main.hold()
    held_signals.main.release()
    assert held_signals._action_of(signal.SIGUSR1) == before
