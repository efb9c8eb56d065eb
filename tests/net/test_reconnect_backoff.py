"""Reconnect backoff: growing, jittered pauses, and few log lines."""

from __future__ import annotations

import random

from rlinf_actors.net.failure_detection import REMIND_S, RETRY_MAX_S, RETRY_MIN_S, ReconnectBackoff


def test_pauses_double_up_to_a_bound_and_recovery_resets_them():
    backoff = ReconnectBackoff(lambda: 0.0)
    pauses = [backoff.pause() for _ in range(6)]
    assert pauses == [RETRY_MIN_S, 2 * RETRY_MIN_S, 4 * RETRY_MIN_S, 8 * RETRY_MIN_S, RETRY_MAX_S, RETRY_MAX_S]
    backoff.recovered(0.0)
    assert backoff.pause() == RETRY_MIN_S


def test_outage_is_logged_at_its_start_every_minute_and_at_its_end():
    backoff = ReconnectBackoff(lambda: 0.0)
    said = {}
    for now in range(1000, 1150, 3):
        text = backoff.failed(float(now), "gone")
        if text:
            said[now - 1000] = text
    assert said == {0: "gone", 60: "gone (for 60 s now)", 120: "gone (for 120 s now)"}
    assert backoff.recovered(1150.0) == 150.0
    assert backoff.recovered(1151.0) is None
    assert REMIND_S == 60.0


def test_reconnects_of_a_thousand_peers_are_spread_over_time():
    rng = random.Random(5)
    tries = []
    for _ in range(1000):
        backoff, now = ReconnectBackoff(rng.random), 0.0
        while now < 60.0:
            now += backoff.pause()
            tries.append(now)
    late = [at for at in tries if 10.0 <= at < 60.0]
    busiest = max(sum(start <= at < start + 0.1 for at in late) for start in range(10, 59))
    assert busiest < 2 * len(late) / 500  # at most twice the average in any tenth of a second
