"""The hops of one operation, which make its time: they may fall, and not rise unnoticed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.counts import why_no_strace
from rlinf_actors.settings import LOCAL_LINK

pytestmark = [pytest.mark.live, pytest.mark.skipif(bool(why_no_strace()), reason=why_no_strace())]

MOST = {
    "unix": {
        "wait": (3, 10),
        "await": (3, 12),
        "await_uvloop": (5, 16),
        "fan_out": (13, 36),
        "round_trip": (4, 18),
        "item": (6, 28),
    },
    "zmq": {
        "wait": (9, 30),
        "await": (9, 32),
        "await_uvloop": (11, 36),
        "fan_out": (28, 108),
        "round_trip": (8, 36),
        "item": (17, 64),
    },
}
"""Most wake-ups of threads, and most system calls, of one operation in all its processes, by what carries messages
within a node. Lower them with each gain."""
FOLLOWS_LOAD = {"futex", "getpid", "poll", "epoll_wait", "epoll_pwait"}
"""System calls that are not counted: futex where threads want the interpreter's lock at once; getpid and poll, libzmq's
looks at its mailbox, of which late threads make more; and waits for events, of which there are fewer if several events
have come. The wake-ups have the last ones."""


@pytest.mark.parametrize("link", MOST)
def test_an_operation_costs_no_more_wake_ups_and_system_calls(
    tmp_path: Path, link: str, monkeypatch: pytest.MonkeyPatch, rlinf_leak_check: None
) -> None:
    monkeypatch.setenv(LOCAL_LINK, link)
    most = MOST[link]
    root, file = Path(__file__).resolve().parents[2], tmp_path / "counts.json"
    command = [sys.executable, "-m", "benchmarks.counts", "--count", "50", "--json", str(file)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = {
        name: (
            sum(thread["switches"] for process in counts.values() for thread in process["threads"].values()),
            sum(
                number
                for process in counts.values()
                for call, number in process["calls"].items()
                if call not in FOLLOWS_LOAD
            ),
        )
        for name, counts in json.loads(file.read_text()).items()
    }
    more = {name: counts for name, counts in found.items() if counts[0] > most[name][0] or counts[1] > most[name][1]}
    assert not more, f"more than {[most[name] for name in more]}:\n{done.stdout}"
