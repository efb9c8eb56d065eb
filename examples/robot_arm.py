"""A worker moves a robot arm. Whichever process is killed, the arm's last command is stop.

The arm is simulated by a separate process that records every command. ``--fault`` selects the process to kill (kill
-9): ``python examples/robot_arm.py --fault template``. With ``--native`` a loop in C moves the arm (robot_arm_loop.c,
compiled with cc). Python cannot stop that loop, so the loop reads the lease page before each command.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rlinf_actors import Cluster, ComponentPlacement, Worker, procfs
from rlinf_actors.errors import RlinfActorsError
from rlinf_actors.testing import simulated_arm_hardware
from rlinf_actors.testing.simulated_arm import SimulatedArmClient, read_record
from rlinf_actors.worker.leasepage import INCLUDE_DIR


class Env(Worker):
    def __init__(self) -> None:
        super().__init__()
        self.arm = SimulatedArmClient(self.hardware_infos[0].address, self.get_name())

    def processes(self) -> dict[str, int]:
        """Return the pids of the processes that the example can kill."""
        watchdog = os.getppid()
        template = parent(watchdog)
        keeper = parent(template)  # the keeper starts templates for agentd
        return {"worker": os.getpid(), "watchdog": watchdog, "template": template, "agentd": parent(keeper)}

    def stream(self, steps: int) -> None:
        """Read the arm's position and move it, 20 times a second."""
        for _ in range(steps):
            position, _ = self.arm.state()
            self.arm.move(position + 0.01)

    def stream_native(self, library: str) -> None:
        """Move the arm in C. ctypes releases the interpreter's lock meanwhile."""
        loop = ctypes.CDLL(library)
        loop.stream(ctypes.c_void_p(self.lease_page.address), self.arm.fileno())

    @staticmethod
    def stop_hardware(hardware_infos: list[Any]) -> None:
        """Stop the arm through a second connection, when the worker has ended. Runs in a process beside the worker."""
        for info in hardware_infos:
            SimulatedArmClient(info.address, "stopper").stop()

    def _close(self) -> None:
        """Stop the arm and disconnect from it. group.shutdown() calls this."""
        self.arm.stop()
        self.arm.close()


def parent(pid: int) -> int:
    stat = procfs.stat(pid)
    assert stat is not None, f"process {pid} has ended"
    return stat.parent


def compiled(folder: str) -> str:
    """Compile the loop in C and return the path of the shared library."""
    library = f"{folder}/robot_arm_loop.so"
    source = Path(__file__).with_name("robot_arm_loop.c")
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-I", INCLUDE_DIR, "-o", library, source], check=True)
    return library


def stream_until_the_fault(address: str, record: str, fault: str, library: str) -> None:
    cluster_cfg = {
        "num_nodes": 1,
        "component_placement": {"env": {"node_group": "arms", "placement": "0"}},
        "node_groups": [
            {
                "label": "arms",
                "node_ranks": 0,
                "hardware": {"type": simulated_arm_hardware.HW_TYPE, "configs": [{"address": address, "node_rank": 0}]},
            }
        ],
    }
    with Cluster(cluster_cfg=cluster_cfg) as cluster:
        placement = ComponentPlacement({"cluster": cluster_cfg}, cluster)
        group = Env.create_group().launch(cluster, placement.get_strategy("env"), name="env")
        processes = group.processes().wait()[0]
        if fault == "none":
            group.stream(20).wait()
            group.shutdown()
            return
        work = group.stream_native(library) if library else group.stream(1_000_000)
        watcher = SimulatedArmClient(address, "watcher")
        for _ in range(20):  # a second of states
            watcher.state()
        at = time.monotonic()
        os.kill(processes[fault], signal.SIGKILL)
        try:
            work.wait()
        except RlinfActorsError as error:
            print(f"the driver gets: {str(error).splitlines()[0]}")
        while watcher.state()[1]:
            pass
        stop = next(command for command in read_record(record) if command.text == "stop")
        print(f"the arm was stopped {(stop.at - at) * 1000:.1f} ms after its {fault} was killed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fault", choices=("none", "worker", "watchdog", "template", "agentd"), default="worker")
    parser.add_argument("--native", action="store_true", help="move the arm by a loop in C")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        record = f"{folder}/arm.jsonl"
        command = [sys.executable, "-m", "rlinf_actors.testing.simulated_arm", "--record", record]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as arm:
            try:
                assert arm.stdout is not None
                address = arm.stdout.readline().split()[-1]
                stream_until_the_fault(address, record, given.fault, compiled(folder) if given.native else "")
            finally:
                arm.terminate()
        commands = [one.text for one in read_record(record) if one.text.split()[0] in ("move", "stop")]
        print(f"{len(commands)} commands in the arm's record; the last two: {', '.join(commands[-2:])}")


if __name__ == "__main__":
    main()
