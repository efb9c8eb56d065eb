"""The failure detector, with a clock that the test moves."""

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

    def until_the_verdict(self, there: bool, took: float = 0.0) -> str:
        """Go from deadline to deadline up to the verdict. Each check takes *took* seconds and finds *there*."""
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


def test_first_check_is_due_after_three_missed_beats():
    kit = Kit()
    assert kit.detector.next_deadline() == kit.now + 3
    assert not kit.detector.should_check(kit.now + 2.9)
    assert kit.detector.should_check(kit.now + 3)
    assert not kit.detector.should_check(kit.now + 3.1), "one check at a time"
    assert kit.detector.next_deadline() == kit.now + GRACE


@pytest.mark.parametrize("took", [0.0, 0.3, 2.0])
def test_verdict_for_a_cut_network_comes_at_the_lease(took):
    kit = Kit()
    said = kit.until_the_verdict(there=False, took=took)
    assert kit.passed == LEASE
    assert said.startswith("the head was silent for 10 s, and so was its machine for 10 s: the network")


def test_verdict_for_a_head_whose_machine_answers_comes_after_the_grace():
    kit = Kit()
    said = kit.until_the_verdict(there=True)
    assert kit.passed == GRACE
    assert said == "the head was silent for 120 s, although its machine answers"


def test_network_cut_after_one_answer_is_reported_a_lease_later():
    kit = Kit()
    kit.now += 3
    assert kit.detector.should_check(kit.now)
    kit.detector.checked(True, kit.now)
    kit.until_the_verdict(there=False)
    assert kit.passed == 3 + LEASE


def test_one_failed_check_gives_no_verdict():
    kit = Kit()
    for there in (False, False, True) * 5:
        kit.now = kit.detector.next_deadline()
        assert kit.detector.should_check(kit.now)
        kit.detector.checked(there, kit.now)
        assert kit.detector.verdict(kit.now) is None
    assert kit.passed > LEASE


def test_a_message_of_the_head_ends_the_silence_even_during_a_check():
    kit = Kit()
    kit.now += 9
    assert kit.detector.should_check(kit.now)
    kit.detector.heard(kit.now + 0.5)
    kit.detector.checked(False, kit.now + 2)
    assert kit.detector.verdict(kit.now + 3) is None
    assert not kit.detector.suspected(kit.now + 2)


def test_the_only_pending_check_delays_the_verdict():
    kit = Kit()
    kit.now += 9.5  # the loop was busy
    assert kit.detector.should_check(kit.now)
    assert kit.detector.verdict(kit.now + 1) is None
    kit.detector.checked(False, kit.now + 2)
    assert kit.detector.verdict(kit.now + 2) is not None


def test_own_stall_does_not_count_as_silence_of_the_head():
    kit = Kit()
    kit.now += 63
    kit.detector.stalled(60, kit.now)
    assert kit.detector.verdict(kit.now) is None
    assert kit.detector.seconds(kit.now) == 3
    assert kit.detector.next_deadline() == kit.now + BEAT, "waiting messages are read first"


def test_stall_that_is_reported_late_moves_no_time_into_the_future():
    kit = Kit()
    kit.detector.heard(kit.now + 60)  # read before the timer that shows the stall
    kit.detector.stalled(57, kit.now + 60)
    assert kit.detector.seconds(kit.now + 60) == 0


def test_without_checks_only_the_grace_counts():
    kit = Kit(looks=False)
    assert kit.detector.next_deadline() == kit.now + GRACE
    assert not kit.detector.should_check(kit.now + 100)


def test_check_of_a_short_lease_is_due_at_half_of_it():
    kit = Kit()
    kit.detector.lease_s = 2.0
    kit.detector.heard(kit.now)
    assert kit.detector.next_deadline() == kit.now + 1
    kit.until_the_verdict(there=False)
    assert kit.passed == 2


def test_detector_that_has_heard_nothing_has_no_deadline_but_the_grace():
    assert FailureDetector(math.inf).next_deadline() == math.inf
