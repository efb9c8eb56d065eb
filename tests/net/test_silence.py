"""What a head's silence means, with a clock in hand."""

from __future__ import annotations

import math

import pytest

from rlinf_actors.net.failure_detection import FailureDetector

BEAT, LEASE, GRACE = 1.0, 10.0, 120.0


class Kit:
    def __init__(self, looks: bool = True) -> None:
        self.silence = FailureDetector(GRACE, looks)
        self.now = 1000.0
        self.silence.heard(self.now)
        self.began = self.now

    @property
    def passed(self) -> float:
        return self.now - self.began

    def until_it_speaks(self, there: bool, took: float = 0.0) -> str:
        """Go from deadline to deadline, each look ending alike after so many seconds, to the verdict."""
        ends = math.inf
        while True:
            self.now = max(self.now, min(ends, self.silence.next_deadline()))
            if self.now >= ends:
                ends = math.inf
                self.silence.checked(there, self.now)
            verdict = self.silence.verdict(self.now)
            if verdict is not None:
                return verdict
            if self.silence.should_check(self.now):
                ends = self.now + took


def test_nothing_is_asked_before_three_beats_are_missed():
    kit = Kit()
    assert kit.silence.next_deadline() == kit.now + 3
    assert not kit.silence.should_check(kit.now + 2.9)
    assert kit.silence.should_check(kit.now + 3)
    assert not kit.silence.should_check(kit.now + 3.1), "one look at a time"
    assert kit.silence.next_deadline() == kit.now + GRACE


@pytest.mark.parametrize("took", [0.0, 0.3, 2.0])
def test_a_cut_network_is_told_at_the_lease(took):
    kit = Kit()
    said = kit.until_it_speaks(there=False, took=took)
    assert kit.passed == LEASE
    assert said.startswith("the head was silent for 10 s, and so was its machine for 10 s: the network")


def test_a_head_whose_machine_answers_has_its_grace():
    kit = Kit()
    said = kit.until_it_speaks(there=True)
    assert kit.passed == GRACE
    assert said == "the head was silent for 120 s, although its machine answers"


def test_a_machine_that_answered_once_and_then_no_more_is_cut_off_a_lease_later():
    kit = Kit()
    kit.now += 3
    assert kit.silence.should_check(kit.now)
    kit.silence.checked(True, kit.now)
    kit.until_it_speaks(there=False)
    assert kit.passed == 3 + LEASE


def test_one_look_that_was_lost_says_nothing():
    kit = Kit()
    for there in (False, False, True) * 5:
        kit.now = kit.silence.next_deadline()
        assert kit.silence.should_check(kit.now)
        kit.silence.checked(there, kit.now)
        assert kit.silence.verdict(kit.now) is None
    assert kit.passed > LEASE


def test_a_word_of_the_head_ends_the_silence_also_while_a_look_is_under_way():
    kit = Kit()
    kit.now += 9
    assert kit.silence.should_check(kit.now)
    kit.silence.heard(kit.now + 0.5)
    kit.silence.checked(False, kit.now + 2)
    assert kit.silence.verdict(kit.now + 3) is None
    assert not kit.silence.suspected(kit.now + 2)


def test_the_last_look_is_waited_for_if_no_other_has_ended():
    kit = Kit()
    kit.now += 9.5  # a loop that was busy
    assert kit.silence.should_check(kit.now)
    assert kit.silence.verdict(kit.now + 1) is None
    kit.silence.checked(False, kit.now + 2)
    assert kit.silence.verdict(kit.now + 2) is not None


def test_while_we_stood_still_nobody_was_silent():
    kit = Kit()
    kit.now += 63
    kit.silence.stalled(60, kit.now)
    assert kit.silence.verdict(kit.now) is None
    assert kit.silence.seconds(kit.now) == 3
    assert kit.silence.next_deadline() == kit.now + BEAT, "first what waits to be read"


def test_a_stall_that_was_seen_late_puts_nothing_into_the_future():
    kit = Kit()
    kit.silence.heard(kit.now + 60)  # read before the timer that shows the stall
    kit.silence.stalled(57, kit.now + 60)
    assert kit.silence.seconds(kit.now + 60) == 0


def test_who_does_not_look_has_the_grace_alone():
    kit = Kit(looks=False)
    assert kit.silence.next_deadline() == kit.now + GRACE
    assert not kit.silence.should_check(kit.now + 100)


def test_a_short_lease_is_looked_after_at_half():
    kit = Kit()
    kit.silence.lease_s = 2.0
    kit.silence.heard(kit.now)
    assert kit.silence.next_deadline() == kit.now + 1
    kit.until_it_speaks(there=False)
    assert kit.passed == 2


def test_before_the_first_word_there_is_no_deadline_but_the_grace():
    assert FailureDetector(math.inf).next_deadline() == math.inf
