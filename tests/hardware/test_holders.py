"""Who holds memory of GPUs: by a real child process, and an NVML that says what the test wants."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from rlinf_actors import procfs
from rlinf_actors.diagnosis.machine import holders
from rlinf_actors.hardware.child_process import run_child
from rlinf_actors.hardware.probe import read_answer
from rlinf_actors.procfs import WORKER_MARK

pytestmark = [pytest.mark.live, pytest.mark.usefixtures("nothing_left")]


def ended() -> int:
    """Return the pid of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.fixture
def orphan() -> Iterator[subprocess.Popen[bytes]]:
    """A process with the mark of worker w-1, which has no template."""
    with subprocess.Popen(["sleep", "100"], env={**os.environ, WORKER_MARK: "w-1"}) as process:
        yield process
        process.kill()


async def test_living_ended_and_orphaned_holders_are_told_apart(
    nvml_environ: dict[str, str], orphan: subprocess.Popen[bytes]
) -> None:
    gone = ended()
    text = f"0,{os.getpid()},10;3,{gone},2048;3,{orphan.pid},5"
    env = {**nvml_environ, "FAKE_NVML_PROCESSES": text}
    found, faults = await holders(["NV_GPU", "Franka"], env)
    known, _ = await holders(["NV_GPU"], env, {"w-1"})
    assert faults == []
    ours = os.stat("/proc/self/ns/pid").st_ino == 0xEFFFFFFC
    assert [(one.device, one.pid, one.size >> 20, one.state) for one in found] == [
        (0, os.getpid(), 10, "other"), (3, gone, 2048, "ended" if ours else "hidden"), (3, orphan.pid, 5, "orphan")
    ]  # fmt: skip
    assert found[2].command == "sleep"
    assert known[2].state == "worker"
    assert procfs.stat(gone) is None


async def test_figures_of_accelerators_have_the_memory_of_each_process(nvml_environ: dict[str, str]) -> None:
    env = {**nvml_environ, "FAKE_NVML_PROCESSES": f"0,{os.getpid()},10;3,{os.getpid()},5"}
    end = await run_child("rlinf_actors.hardware.probe_child:measure_main", ["NV_GPU"], env=env, timeout_s=30.0)
    report = read_answer(end, "NV_GPU", 30.0)
    assert report.faults == []
    assert report.infos[0].memory_used_bytes >= 0
    assert report.held == [(0, os.getpid(), 10 << 20), (3, os.getpid(), 5 << 20)]


async def test_a_broken_library_is_a_fault(nvml_environ: dict[str, str]) -> None:
    found, faults = await holders(["NV_GPU"], {**nvml_environ, "FAKE_NVML_MODE": "processes=segfault"})
    assert found == []
    assert "the library of NV_GPU crashed its process (SIGSEGV)" in faults[0]


async def test_a_type_whose_library_names_no_processes_is_not_asked() -> None:
    assert await holders(["AMD_GPU", "Franka"], {}) == ([], [])
