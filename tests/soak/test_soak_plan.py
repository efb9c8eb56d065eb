"""The plan follows from the seed alone, and no operation of it waits for ever. Pure."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from deliveries import Event, Stream
from soak_log import Log, read
from soak_plan import BASE, CHANNELS, KEYS, items, plan

NAMES = ["a", "b", "c", "d"]


def test_another_process_makes_the_same_plan() -> None:
    script = "from soak_plan import *; print(plan(7, 3, ['a', 'b', 'c', 'd'], 2), items('7 3', 20, True))"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "PYTHONHASHSEED": "1"}
    said = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == f"{plan(7, 3, NAMES, 2)} {items('7 3', 20, True)}"
    assert plan(7, 3, NAMES, 2) != plan(7, 4, NAMES, 2)


@pytest.mark.parametrize("seed", range(20))
def test_every_queue_has_a_surviving_consumer_and_steady_workers_live(seed: int) -> None:
    made = plan(seed, 0, NAMES, 2)
    assert set(made.victims) <= {"c", "d"}
    for channel in CHANNELS:
        for key in KEYS:
            assert any((who, channel, key) in made.gets for who in "ab")
    assert len(set(made.gets)) == len(made.gets)
    for item in items(f"{seed}", 100):
        assert 0 <= item.offset <= item.offset + item.size <= BASE


def test_events_can_be_read_before_the_log_is_closed(tmp_path: Path) -> None:
    log = Log(str(tmp_path), "a")
    log.write("offer", Stream("pair", "a", "b"), 3)
    log.write("refused", Stream("pair", "a", "b"), 3, "send")
    expected = [Event("offer", Stream("pair", "a", "b"), 3), Event("refused", Stream("pair", "a", "b"), 3, "send")]
    assert read(str(tmp_path)) == {"a": expected}
    log.close()
