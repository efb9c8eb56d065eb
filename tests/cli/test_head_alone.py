"""`rlinf-actors head` that is killed and started again, and its file that cannot be used. Real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlinf_actors.head.store import FILE

pytestmark = pytest.mark.live

COMMAND = (sys.executable, "-m", "rlinf_actors.cli.main")


@contextmanager
def head(directory: Path, listen: str = "127.0.0.1:0") -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A head, and its address; killed at the end."""
    command = [*COMMAND, "head", "--listen", listen, "--state-dir", str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def ask(address: str, *arguments: str) -> dict:
    done = subprocess.run(
        [*COMMAND, *arguments, "--json", "--head", address], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def test_an_emergency_stop_and_a_higher_epoch_survive_kill_9(tmp_path):
    with head(tmp_path) as (_, address):
        stopped = ask(address, "estop", "--reason", "smoke")
        assert stopped["warning"] == ""
    with head(tmp_path, address) as (_, again):
        status = ask(again, "status")
    assert again == address
    assert status["epoch"].startswith("2-")
    assert status["trouble"] == []
    assert [line for line in status["estop"] if "smoke" in line] == status["estop"] != []


def test_a_second_head_of_one_directory_exits_with_78_and_says_so(tmp_path):
    with head(tmp_path) as (_, address), head(tmp_path) as (second, nothing):
        assert address
        assert nothing == ""
        assert second.wait(10) == 78
        said = second.stderr.read()
    assert str(tmp_path / FILE) in said
    assert "is used by another head that runs" in said


def test_a_damaged_file_is_78_and_is_left_as_it_is(tmp_path):
    (tmp_path / FILE).write_bytes(b"rubbish" * 1000)
    with head(tmp_path) as (process, nothing):
        assert nothing == ""
        assert process.wait(10) == 78
        said = process.stderr.read()
    assert str(tmp_path / FILE) in said
    assert "see first that every robot is safe" in said
    assert (tmp_path / FILE).read_bytes() == b"rubbish" * 1000
