"""The example cartpole: its policy learns, a killed worker changes no return, and its chart fits its terminal."""

from __future__ import annotations

import os
import pty
import re
import struct
import subprocess
import sys
import termios
from fcntl import ioctl
from pathlib import Path

import pace
import pytest
from rich.text import Text

from tests import pictures

README = Path(__file__).resolve().parents[2] / "README.md"
CARTPOLE = README.parent / "examples" / "cartpole"
PICTURE = pictures.DOCS / "tutorial" / "pictures" / "returns.svg"
COLUMNS = 80


def run(*arguments: str) -> str:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("RLINF_HEAD")}
    done = subprocess.run(
        [sys.executable, str(CARTPOLE / "train.py"), *arguments], env=clean, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, check=False, timeout=pace.PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


ALONE = """
import numpy as np
from cartpole import improved, play
weights = np.zeros(4)
for round in range(10):
    batches = [play(weights, (round, seed)) for seed in range(12)]
    weights = improved(weights, batches)
    print(f"{np.mean([batch.returns for batch in batches]):.1f}")
"""
"""The training in one process."""


@pytest.mark.live
def test_the_return_rises_and_a_killed_worker_does_not_change_it():
    out = run("--rounds", "10")
    assert re.search(r"^rollout:\d was killed by signal 9; rollout:\d played its batch$", out, re.M)
    assert re.search(r"^rollout:\d is back as process \d+, and has the newest weights$", out, re.M)
    alone = subprocess.run([sys.executable, "-c", ALONE], cwd=CARTPOLE, capture_output=True, text=True, check=True)
    means = re.findall(r"^round .*: mean return +(\S+)$", out, re.M)
    assert means == alone.stdout.split()
    assert float(means[0]) < 50
    assert float(means[-1]) > 150


@pytest.mark.live
def test_no_worker_is_killed_if_so_asked():
    assert "killed" not in run("--no-kill", "--rounds", "2")


@pytest.mark.live
def test_one_worker_alone_is_refused():
    with pytest.raises(AssertionError, match="--workers must be at least 2"):
        run("--workers", "1")


SHOW = (
    "from screen import Screen; s = Screen(6, 500); s.note('begun'); s.show(10); s.show(25); s.note('died', mark=True);"
    "s.show(284.4); s.show(500); s.note('ended')"
)


def shown(rows: int, columns: int, program: str = SHOW, **env: str) -> str:
    """Return what a small program with a Screen writes to a terminal of that size."""
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    clean = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=CARTPOLE, stdin=theirs, stdout=theirs,
        env={**clean, "TERM": "xterm", "PYTHONUTF8": "1", **env},
    ):  # fmt: skip
        os.close(theirs)
        written = b""
        while True:
            try:
                written += os.read(ours, 65536)
            except OSError:  # the program has ended
                break
    os.close(ours)
    return written.decode().replace("\r", "")


def last_screen(written: str) -> list[str]:
    return written.rpartition("F\x1b[2K")[2].replace("\x1b[2K", "").splitlines()


def test_a_bar_ends_at_its_value_between_the_labels():
    """The tick of a label is in the middle of its row, so a bar of 500 ends there, and one of 0 at the axis."""
    assert last_screen(shown(40, 100)) == [
        "  500 ┤         ▄▄ ",
        "      │         ██ ",
        "  400 ┤         ██ ",
        "      │         ██ ",
        "  300 ┤      ▂▂ ██ ",
        "      │      ██ ██ ",
        "  200 ┤      ██ ██ ",
        "      │      ██ ██ ",
        "  100 ┤      ██ ██ ",
        "      │      ██ ██ ",
        "    0 ┼───▀▀─▀▀─▀▀───────",
        "round   1  2  3† 4  5  6 ",
        "       round  4: mean return 500.0",
        "begun",
        "† died",
        "ended",
    ]


@pytest.mark.parametrize(("rows", "columns", "term"), [(40, 20, "xterm"), (10, 100, "xterm"), (40, 100, "dumb")])
def test_a_terminal_without_room_or_cursor_gets_lines(rows, columns, term):
    assert shown(rows, columns, TERM=term).splitlines() == [
        "begun", "round  1: mean return  10.0", "round  2: mean return  25.0", "died", "round  3: mean return 284.4",
        "round  4: mean return 500.0", "ended",
    ]  # fmt: skip


def test_picture_of_readme_is_the_chart_of_the_run_that_readme_prints():
    said = re.search(r"^```text\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)[1].splitlines()
    rounds = sum(line.startswith("round ") for line in said)
    calls = [f"from screen import Screen; from cartpole import LONGEST; s = Screen({rounds}, LONGEST)"]
    calls += [
        f"s.show({line.split()[-1]})" if line.startswith("round ") else f"s.note({line!r}, {'killed' in line})"
        for line in said
    ]
    chart = last_screen(shown(40, COLUMNS, "; ".join(calls)))
    assert {line for line in said if not line.startswith("round ")} < {line.removeprefix("† ") for line in chart}
    if pictures.MAKES:
        text = Text("\n".join(chart))
        PICTURE.write_text(pictures.terminal_svg(text, COLUMNS, "python examples/cartpole/train.py", "returns"))
    assert pictures.same(pictures.lines_of_svg(PICTURE.read_text()), [line.rstrip() for line in chart]), pictures.AGAIN
    assert PICTURE.relative_to(README.parent).as_posix() in README.read_text()
