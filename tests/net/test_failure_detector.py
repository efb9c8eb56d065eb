"""What a head's detector means, with a clock in hand."""

from __future__ import annotations

import math

import pytest

from rlinf_actors.net.failure_detection import FailureDetector

BEAT, LEASE, GRACE = 1.0, 10.0, 120.0


class Kit:
    def __init__(self, looks: bool = True) -> None:
        self.detector = FailureDetector(GRACE, looks)
        self.now = 1000.0
        self.detector.heard(self.now)
        self.began = self.now

    @property
    def passed(self) -> float:
        return self.now - self.began

    def until_it_speaks(self, there: bool, took: float = 0.0) -> str:
        """Go from deadline to deadline, each look ending alike after so many seconds, to the verdict."""
        ends = math.inf
        while True:
            self.now = max(self.now, min(ends, self.detector.next_deadline()))
            if self.now >= ends:
                ends = math.inf
                self.detector.checked(there, self.now)
            verdict = self.detector.verdict(self.now)
            if verdict is not None:
                return verdict
            if self.detector.should_check(self.now):
                ends = self.now + took


def test_nothing_is_asked_before_three_beats_are_missed():
    kit = Kit()
    assert kit.detector.next_deadline() == kit.now + 3
    assert not kit.detector.should_check(kit.now + 2.9)
    assert kit.detector.should_check(kit.now + 3)
    assert not kit.detector.should_check(kit.now + 3.1), "one look at a time"
    assert kit.detector.next_deadline() == kit.now + GRACE


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
    assert kit.detector.should_check(kit.now)
    kit.detector.checked(True, kit.now)
    kit.until_it_speaks(there=False)
    assert kit.passed == 3 + LEASE


def test_one_look_that_was_lost_says_nothing():
    kit = Kit()
    for there in (False, False, True) * 5:
        kit.now = kit.detector.next_deadline()
        assert kit.detector.should_check(kit.now)
        kit.detector.checked(there, kit.now)
        assert kit.detector.verdict(kit.now) is None
    assert kit.passed > LEASE


def test_a_word_of_the_head_ends_the_silence_also_while_a_look_is_under_way():
    kit = Kit()
    kit.now += 9
    assert kit.detector.should_check(kit.now)
    kit.detector.heard(kit.now + 0.5)
    kit.detector.checked(False, kit.now + 2)
    assert kit.detector.verdict(kit.now + 3) is None
    assert not kit.detector.suspected(kit.now + 2)


def test_the_last_look_is_waited_for_if_no_other_has_ended():
    kit = Kit()
    kit.now += 9.5  # a loop that was busy
    assert kit.detector.should_check(kit.now)
    assert kit.detector.verdict(kit.now + 1) is None
    kit.detector.checked(False, kit.now + 2)
    assert kit.detector.verdict(kit.now + 2) is not None


def test_while_we_stood_still_nobody_was_silent():
    kit = Kit()
    kit.now += 63
    kit.detector.stalled(60, kit.now)
    assert kit.detector.verdict(kit.now) is None
    assert kit.detector.seconds(kit.now) == 3
    assert kit.detector.next_deadline() == kit.now + BEAT, "first what waits to be read"


def test_a_stall_that_was_seen_late_puts_nothing_into_the_future():
    kit = Kit()
    kit.detector.heard(kit.now + 60)  # read before the timer that shows the stall
    kit.detector.stalled(57, kit.now + 60)
    assert kit.detector.seconds(kit.now + 60) == 0


def test_without_checks_only_the_grace_counts():
    kit = Kit(looks=False)
    assert kit.detector.next_deadline() == kit.now + GRACE
    assert not kit.detector.should_check(kit.now + 100)


def test_a_short_lease_is_looked_after_at_half():
    kit = Kit()
    kit.detector.lease_s = 2.0
    kit.detector.heard(kit.now)
    assert kit.detector.next_deadline() == kit.now + 1
    kit.until_it_speaks(there=False)
    assert kit.passed == 2


def test_before_the_first_word_there_is_no_deadline_but_the_grace():
    assert FailureDetector(math.inf).next_deadline() == math.inf
