"""Programs and commands of docs/tutorial/ run, and do what their pages say. A program's first line is its file name."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pace
import page_blocks
import pytest

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = ROOT / "docs" / "tutorial"
EXAMPLES = ROOT / "examples"

pytestmark = pytest.mark.live


def program(page: str, name: str, folder: Path) -> Path:
    """Write a page's program into *folder* and return its path."""
    blocks = re.findall(r"^```python\n(# (\S+)\n.*?)^```$", (TUTORIALS / page).read_text(), re.M | re.S)
    path = folder / name
    path.write_text({file: text for text, file in blocks}[name])
    return path


def run(command: Path | str, folder: Path, **ours: str) -> str:
    """Run a program, or a command of a page (`words`)."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("RLINF_HEAD")}
    arguments = [sys.executable, str(command)] if isinstance(command, Path) else words(command, **ours)
    done = subprocess.run(
        arguments, cwd=folder, env=clean, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        timeout=pace.PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def words(command: str, **ours: str) -> list[str]:
    """A command of a page: its programs are those of this environment, and its words are replaced by *ours*."""
    here = Path(sys.executable).parent
    programs = {name: str(here / name) for name in ("python", "pytest", "rlinf-actors")}
    return [{**programs, **ours}.get(word, word) for word in shlex.split(command.replace(".venv/bin/", ""))]


def commands_of(page: str) -> list[str]:
    """The commands of a page that run."""
    return [line for one in page_blocks.blocks(TUTORIALS / page, "") if not one.reason for line in one.lines]


def test_first_program_prints_what_its_page_shows(tmp_path):
    shown = re.search(r"^```text\n(.*?)^```$", (TUTORIALS / "first-program.md").read_text(), re.M | re.S)
    assert shown is not None
    program("first-program.md", "first.py", tmp_path)
    [command] = commands_of("first-program.md")
    out = run(command, tmp_path)
    same = re.compile(r":\d on \S+ raised")  # the first rank that fails, and the machine's name
    assert same.sub(":R on HOST raised", out) == same.sub(":R on HOST raised", shown[1])


def test_first_program_in_asyncio(tmp_path):
    out = run(program("first-program.md", "first_async.py", tmp_path), tmp_path)
    assert out == "['hello from rank 0', 'hello from rank 1']\n"


# --- Train a policy ---

_OWN = re.compile(r"rollout:\d|process \d+|return +[\d.]+|in [\d.]+ s")
"""What another run may print otherwise. Returns depend on the processor."""


def screens(page: str) -> list[str]:
    """The ```text blocks of a page."""
    return re.findall(r"^```text\n(.*?)^```$", (TUTORIALS / page).read_text(), re.M | re.S)


def changed(text: str, diff: str) -> str:
    """Apply the hunks of a ```diff block, which @@ separates."""
    for hunk in diff.split("@@\n"):
        old, new = ("".join(line[1:] for line in hunk.splitlines(True) if line[0] in kinds) for kinds in (" -", " +"))
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def test_the_steps_of_train_a_policy_print_what_the_page_shows(tmp_path):
    page = "train-a-policy.md"
    shutil.copy(EXAMPLES / "cartpole" / "cartpole.py", tmp_path)
    first, killed, finished = screens(page)
    alone = run(program(page, "step1.py", tmp_path), tmp_path)
    assert _OWN.sub("N", alone) == _OWN.sub("N", first)
    assert run(program(page, "step2.py", tmp_path), tmp_path) == alone
    step3 = program(page, "step3.py", tmp_path)
    assert run(step3, tmp_path) == alone
    [diff] = re.findall(r"^```diff\n(.*?)^```$", (TUTORIALS / page).read_text(), re.M | re.S)
    step4 = tmp_path / "step4.py"
    step4.write_text(changed(step3.read_text(), diff))
    out = run(step4, tmp_path)
    assert _OWN.sub("N", out) == _OWN.sub("N", killed)
    assert [line for line in out.splitlines(True) if line.startswith("round")] == alone.splitlines(True)
    [command] = commands_of(page)
    out = run(command.removesuffix(" | cat"), ROOT)  # here no terminal reads it anyway
    assert _OWN.sub("N", out) == _OWN.sub("N", finished)
    assert re.findall(r"return +(\S+)", out)[:6] == re.findall(r"return +(\S+)", alone)


CELL, ARM = commands_of("robot-cell.md"), "127.0.0.1:4000"


@pytest.fixture
def arm(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A simulated arm: its address and its record."""
    record = tmp_path / "arm.jsonl"
    command = words(CELL[0], **{"4000": "0", "arm.jsonl": str(record)})
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said, _, address = process.stdout.readline().strip().rpartition(" ")
        assert said == f"the simulated arm with the record {record} listens at"
        yield address, record
        process.terminate()


def commands(record: Path) -> list[str]:
    return [json.loads(line)["command"] for line in record.read_text().splitlines()]


def test_robot_cell_ends_with_a_stop(tmp_path, arm):
    address, record = arm
    program("robot-cell.md", "cell.py", tmp_path)
    assert "position" in run(CELL[1], tmp_path, **{ARM: address})
    assert commands(record)[-2:] == ["stop", "closed"]


def test_robot_cell_stops_when_its_driver_is_killed(tmp_path, arm, rlinf_leak_check):
    address, record = arm
    program("robot-cell.md", "cell.py", tmp_path)
    moving = words(CELL[2], **{ARM: address})
    with subprocess.Popen(moving, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "moving\n"
        pace.again_like(lambda: any(text.startswith("move") for text in commands(record)), True)
        driver.send_signal(signal.SIGKILL)
    assert pace.again_like(lambda: commands(record)[-2:], ["stop", "closed"]) == ["stop", "closed"]


def test_robot_cell_sends_frames_and_stops_when_its_button_is_pressed(tmp_path, arm, rlinf_leak_check):
    address, record = arm
    program("robot-cell.md", "cell.py", tmp_path)
    program("robot-cell.md", "camera.py", tmp_path)
    frames, pressed = screens("robot-cell.md")
    own = re.compile(r"column \d+|\d+ in the last")
    assert own.sub("N", run(CELL[3], tmp_path, **{ARM: address})) == own.sub("N", frames)
    ours, theirs = pty.openpty()  # the terminal of the button
    filming = words(CELL[4], **{ARM: address})
    with subprocess.Popen(filming, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as driver:
        try:
            assert driver.stdout is not None
            assert driver.stdout.readline() == "filming\n"
            with subprocess.Popen(words(CELL[5]), stdin=theirs, stdout=theirs, stderr=theirs) as button:
                os.close(theirs)
                shown = until(ours, "ARMED")
                os.write(ours, b"\n")
                shown += until(ours, "every known head has acknowledged")
            assert button.returncode == 0
            _, error = driver.communicate(timeout=pace.PATIENCE_S)
        finally:
            os.close(ours)
            driver.kill()
    assert driver.returncode == 1
    assert "emergency stop by " in error
    assert commands(record)[-2:] == ["stop", "closed"]
    for line in pressed.splitlines():  # each begins with words, before what differs
        begin = re.match(r"[A-Z]+ |stopping|  \w+|every known head", line)
        assert begin is not None
        assert begin[0] in shown


def until(terminal: int, text: str) -> str:
    """Return what is written to a terminal, up to *text*. OSError if its writers end before."""
    shown = ""
    while text not in shown:
        shown += os.read(terminal, 65536).decode()
    return shown


def test_programs_of_the_testing_page_pass(tmp_path):
    program("testing.md", "test_counter.py", tmp_path)
    [command] = commands_of("testing.md")
    assert "3 passed" in run(command, tmp_path)
