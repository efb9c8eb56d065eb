"""A child process for code that may do anything: what it leaves."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from rlinf_actors import procfs
from rlinf_actors.hardware.child_process import run_child

LEAVES_A_TOOL = """
import os, subprocess, sys
def main(argv):
    tool = subprocess.Popen(["sleep", "60"], preexec_fn=os.setpgrp)
    print(tool.pid, flush=True)
    os._exit(3)
"""


def refuse(*args: object) -> None:
    raise PermissionError(1, "Operation not permitted")


@pytest.mark.live
async def test_a_tool_of_another_user_is_left_running_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "leaves.py").write_text(LEAVES_A_TOOL)
    procfs.set_subreaper()  # as agentd is
    kill = os.kill
    monkeypatch.setattr(os, "kill", refuse)
    monkeypatch.setattr(signal, "pidfd_send_signal", refuse)
    end = await run_child("leaves", [], env=dict(os.environ), timeout_s=60, root=str(tmp_path))
    tool = int(end.output)
    kill(tool, signal.SIGKILL)
    await asyncio.to_thread(os.waitpid, tool, 0)
    assert (end.code, end.note) == (3, "")
    said = f"process {tool}, which the hardware probe started, cannot be killed: it became another user's process"
    assert {record.getMessage() for record in caplog.records} == {said}


FLOODS = """#!/bin/sh
head -c 100000000 /dev/zero | tr '\\0' x
echo "$?" >&2
"""


@pytest.mark.live
async def test_output_of_any_program_is_held_within_bounds(tmp_path: Path) -> None:
    """An interpreter of a user need not run our code, which limits itself."""
    program = tmp_path / "python"
    program.write_text(FLOODS)
    program.chmod(0o755)
    end = await run_child("", [], python=str(program), env=dict(os.environ), timeout_s=60)
    assert "write error: Operation not permitted" in end.errors
    assert end.output == b"x" * (1 << 20)
