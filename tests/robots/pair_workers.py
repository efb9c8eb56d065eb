"""Workers that move simulated arms at 50 Hz and have a hook, stop_hardware, or both; and the driver that launches them.

``python -c "import pair_workers; pair_workers.main()" CONFIG`` is the driver: a line of JSON on its stdin is an order,
answered by a line on its stdout.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import sys
import threading
import time
from typing import Any

from matrix_workers import CYCLE_S, processes, say

from rlinf_actors import Cluster, ComponentPlacement, NodePlacementStrategy, Worker
from rlinf_actors.testing import simulated_arm_hardware  # noqa: F401 - importing it registers the arms' type
from rlinf_actors.testing.simulated_arm import SimulatedArmClient

LAUNCHES = 8
"""Launches at a time, so that one machine with all the nodes has time for leases too."""
CROWD = 100
"""Workers that are launched beside robots."""
LOCKED = "move 7.0"
"""What a worker tells its arm while its C code holds the interpreter's lock."""
SOURCE = f"""
#include <unistd.h>

/* Asks nobody, and does not return. */
void move(int arm) {{
    for (;;) {{
        if (write(arm, "{LOCKED}\\n", {len(LOCKED) + 1}) < 0) return;
        usleep({CYCLE_S * 1e6:.0f});
    }}
}}
"""


class Moving(Worker):
    """Moves its arm from a thread of its own."""

    def __init__(self, library: str = "", address: str = "") -> None:
        address = address or self.hardware_infos[0].address
        self.arm = SimulatedArmClient(address, f"{self.get_name()} {os.getpid()}")
        self.library = library
        threading.Thread(target=self._move, daemon=True).start()

    def _move(self) -> None:
        while True:
            self.arm.move(1.0)
            time.sleep(CYCLE_S)

    def processes(self) -> tuple[int, int, int]:
        """Of the worker, its watchdog and its template."""
        return processes()

    def hold_the_lock(self) -> None:
        ctypes.PyDLL(self.library).move(self.arm.fileno())

    def replace_itself(self) -> None:
        fd = self.arm.fileno()
        os.set_inheritable(fd, True)
        code = f"import os, time\nwhile True: os.write({fd}, b'move 2.0\\n'); time.sleep({CYCLE_S})"
        os.execv(sys.executable, [sys.executable, "-c", code])


class Hook(Moving):
    def on_lease_lost(self) -> None:
        self.arm.stop()


class Outside(Moving):
    @staticmethod
    def stop_hardware(hardware_infos: list[Any]) -> None:
        for info in hardware_infos:
            SimulatedArmClient(info.address, f"{os.environ['WORKER_NAME']} outside").stop()


class Both(Outside, Hook):
    pass


class Launching(Worker):
    """Launches the group that moves its arm, as RLinf's environments do."""

    def begin(self, name: str, cls: str, node: int) -> tuple[int, int, int]:
        group = globals()[cls].create_group(address=self.hardware_infos[0].address)
        self.group = group.launch(Cluster(), NodePlacementStrategy([node]), name=name)
        return tuple(self.group.processes().wait()[0])

    def processes(self) -> tuple[int, int, int]:
        return processes()


class Idle(Worker):
    pass


class Driver:
    """Obeys orders; the groups of a pass end with it."""

    def __init__(self, cluster: Cluster, config: dict[str, Any]) -> None:
        self._cluster, self._config = cluster, config
        self._groups: dict[str, Any] = {}
        self._crowd: asyncio.Task[None] | None = None
        self._launching = asyncio.Semaphore(LAUNCHES)

    async def launch(self, rows: list[dict[str, Any]]) -> dict[str, list[list[int]]]:
        """The processes that move the arm, and those of the worker that launched them, by row."""
        found = await asyncio.gather(*map(self._launch, rows))
        return {row["name"]: pids for row, pids in zip(rows, found, strict=True)}

    async def _launch(self, row: dict[str, Any]) -> list[Any]:
        async with self._launching:
            return await self._launch_one(row)

    async def _launch_one(self, row: dict[str, Any]) -> list[Any]:
        strategy = ComponentPlacement(self._config, self._cluster).get_strategy(row["component"])
        options = {"name": row["name"], "wait_for_hardware": 30}
        if "node" not in row:
            group = globals()[row["cls"]].create_group(self._config["library"])
            self._groups[row["name"]] = group = await group.launch(self._cluster, strategy, **options)
            return [(await group.processes())[0]] * 2
        group: Any = Launching.create_group()
        options["name"] = f"{row['name']}-launcher"
        self._groups[row["name"]] = group = await group.launch(self._cluster, strategy, **options)
        moving = (await group.begin(row["name"], row["cls"], row["node"]))[0]
        return [moving, (await group.processes())[0]]

    async def call(self, method: str, names: list[str]) -> None:
        """Start a call of each of these groups; its end is of no interest."""
        for name in names:
            getattr(self._groups[name], method)()

    async def crowd(self, node: int) -> None:
        self._crowd = asyncio.create_task(self._launch_crowd(node))

    async def _launch_crowd(self, node: int) -> None:
        with contextlib.suppress(Exception):  # its agentd stands still
            group: Any = Idle.create_group()
            self._groups["crowd"] = await group.launch(
                self._cluster, NodePlacementStrategy([node] * CROWD), name="crowd"
            )

    async def end(self) -> None:
        if self._crowd is not None:
            self._crowd.cancel()
            await asyncio.wait([self._crowd])
            self._crowd = None
        groups, self._groups = self._groups, {}
        await asyncio.gather(*(group.shutdown() for group in groups.values()), return_exceptions=True)


async def serve() -> None:
    config = json.loads(sys.argv[1])
    loop = asyncio.get_running_loop()
    async with Cluster.connect(cluster_cfg=config["cluster"], timeout=60) as cluster:
        driver = Driver(cluster, config)
        say({"ready": os.getpid()})
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            order = json.loads(line)
            say(await getattr(driver, order.pop("do"))(**order) or {})


def main() -> None:
    asyncio.run(serve())
