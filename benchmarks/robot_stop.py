"""Measure the time from a fault to a robot arm's stop command: ``python -m benchmarks.robot_stop [--repeat N]``.

A LocalCluster has two nodes. The second has a simulated arm, and a worker that sends 400 moves a second. The arm's
record and the fault use the same clock. A stopped process (SIGSTOP) stands for a cut network: both are silent.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlinf_actors import Cluster, ComponentPlacement, Worker
from rlinf_actors.cli import app
from rlinf_actors.errors import RlinfActorsError
from rlinf_actors.testing import LocalCluster, simulated_arm_hardware
from rlinf_actors.testing.simulated_arm import SimulatedArmClient, read_record


class Streamer(Worker):
    def __init__(self) -> None:
        self.arm = SimulatedArmClient(self.hardware_infos[0].address)

    def processes(self) -> tuple[int, int]:
        return os.getpid(), os.getppid()

    def stream(self) -> None:
        while True:
            for _ in range(20):
                self.arm.move(1.0)
            self.arm.state()

    def on_lease_lost(self) -> None:
        self.arm.stop()


@dataclass
class Scene:
    """A cluster with a streaming worker, and the pids of the processes that a fault can hit."""

    local: LocalCluster
    worker: int
    template: int
    driver: int


def _kill(number: int, who: Callable[[Scene], int]) -> Callable[[Scene], Any]:
    return lambda scene: os.kill(who(scene), number)


FAULTS: dict[str, Callable[[Scene], Any]] = {
    "SIGTERM to the worker": _kill(signal.SIGTERM, lambda scene: scene.worker),
    "kill -9 of the template": _kill(signal.SIGKILL, lambda scene: scene.template),
    "kill -9 of agentd": _kill(signal.SIGKILL, lambda scene: scene.local.nodes[1].pid),
    "kill -9 of the driver": _kill(signal.SIGKILL, lambda scene: scene.driver),
    "estop": lambda scene: app.run(["estop"]),
    "agentd stands still": _kill(signal.SIGSTOP, lambda scene: scene.local.nodes[1].pid),
    "the head stands still": _kill(signal.SIGSTOP, lambda scene: scene.local.nodes[0].pid),
}


def drive(address: str, tell: int) -> None:
    """Run the driver: stream until the call fails or this process is killed."""
    section: dict[str, Any] = {
        "num_nodes": 2,
        "component_placement": {"env": {"node_group": "arms", "placement": "0"}},
        "node_groups": [
            {
                "label": "arms",
                "node_ranks": 1,
                "hardware": {"type": simulated_arm_hardware.HW_TYPE, "configs": [{"address": address, "node_rank": 1}]},
            }
        ],
    }
    with Cluster(cluster_cfg=section) as cluster:
        strategy = ComponentPlacement({"cluster": section}, cluster).get_strategy("env")
        group = Streamer.create_group().launch(cluster, strategy, name="env")
        worker, template = group.processes().wait()[0]
        work = group.stream()
        os.write(tell, f"{worker} {template}\n".encode())
        try:
            work.wait()
        except RlinfActorsError as error:
            print(f"  {str(error).splitlines()[0]}", file=sys.stderr)


def measure(fault: str) -> float:
    """Return the seconds from *fault* to the stop command."""
    with tempfile.TemporaryDirectory() as folder, LocalCluster(2) as local:
        record = Path(folder, "arm.jsonl")
        command = [sys.executable, "-m", "rlinf_actors.testing.simulated_arm", "--record", str(record)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as arm:
            try:
                assert arm.stdout is not None
                return _measure(fault, local, f"127.0.0.1:{int(arm.stdout.readline())}", record)
            finally:
                arm.terminate()


def _measure(fault: str, local: LocalCluster, address: str, record: Path) -> float:
    os.environ.update(local.driver_env)
    heard, tell = os.pipe()
    command = [sys.executable, "-m", "benchmarks.robot_stop", "--drive", address, str(tell)]
    with subprocess.Popen(command, pass_fds=(tell,)) as driver:
        os.close(tell)
        select.select([heard], [], [], 30)
        worker, template = map(int, os.read(heard, 100).split())
        os.close(heard)
        watcher = SimulatedArmClient(address)
        for _ in range(30):
            watcher.state()
        at = time.monotonic()
        FAULTS[fault](Scene(local, worker, template, driver.pid))
        while watcher.state()[1]:
            pass
        for node in local.nodes:
            if node.alive:
                os.kill(node.pid, signal.SIGCONT)
        driver.wait()
    (stop,) = [one for one in read_record(record) if one.text == "stop"]
    return stop.at - at


def main() -> None:
    """Print a table of delays in milliseconds."""
    parser = argparse.ArgumentParser(prog="benchmarks.robot_stop")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--drive", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.drive:
        drive(given.drive[0], int(given.drive[1]))
        return
    for fault in FAULTS:
        delays = sorted(measure(fault) for _ in range(given.repeat))
        print(f"{fault:<26}" + "".join(f"{delay * 1000:>10.1f}" for delay in delays) + " ms", flush=True)


if __name__ == "__main__":
    main()
