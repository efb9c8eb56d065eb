"""Which handlers of signals are held back while messages are handled, and what a signal of that time does."""

from __future__ import annotations

import os
import signal

import pytest

from rlinf_actors.net.held_signals import HeldSignals, not_held


@pytest.fixture
def set_handler():
    """Sets handlers, and puts the handlers of before back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    yield signal.signal
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_handler_runs_after_the_handling_and_may_raise_then(set_handler):
    class Struck(Exception):
        pass

    def strike(number, frame):
        raise Struck

    set_handler(signal.SIGUSR1, strike)
    held = HeldSignals()
    held.hold()
    os.kill(os.getpid(), signal.SIGUSR1)
    with pytest.raises(Struck):
        held.release()
    assert signal.getsignal(signal.SIGUSR1) is strike


def test_a_handler_that_waits_itself_is_not_held_back(set_handler):
    came = []

    class Owner:
        @not_held
        def note(self, number, frame):
            came.append(number)

    owner = Owner()
    set_handler(signal.SIGUSR1, owner.note)
    set_handler(signal.SIGUSR2, signal.SIG_IGN)
    held = HeldSignals()
    held.hold()
    assert signal.getsignal(signal.SIGUSR1) == owner.note
    os.kill(os.getpid(), signal.SIGUSR1)
    assert came == [signal.SIGUSR1]
    held.release()
    assert came == [signal.SIGUSR1]
