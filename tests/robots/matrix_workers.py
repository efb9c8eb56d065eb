"""Workers that stream to simulated arms at 50 Hz, each in its own way, and the driver that launches them.

``python -c "import matrix_workers; matrix_workers.main()" CONFIG`` is the driver: a line of JSON on its stdin is an
order, answered by a line on its stdout.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlinf_actors import Cluster, ComponentPlacement, Worker
from rlinf_actors.testing import simulated_arm_hardware  # noqa: F401 - importing it registers the arms' type
from rlinf_actors.testing.simulated_arm import SimulatedArmClient

CYCLE_S = 0.02
SOURCE = """
#include <rlinf_lease.h>
#include <stdio.h>
#include <unistd.h>

/* Returns 1 when the lease is over. */
int stream(const void *page, int arm, int cycles) {
    char command[40];
    for (int n = 0; n < cycles; n++) {
        if (!rlinf_lease_held(page)) return 1;
        int length = snprintf(command, sizeof command, "move %d.0\\n", n);
        if (write(arm, command, length) != length) return 1;
        usleep(20000);
    }
    return 0;
}
"""


def processes() -> tuple[int, int, int]:
    """Return the pids of this worker, its watchdog and its template."""
    watchdog = os.getppid()
    return os.getpid(), watchdog, int(Path(f"/proc/{watchdog}/stat").read_text().rpartition(")")[2].split()[1])


class Streamer(Worker):
    """Moves its arms 50 times a second, whatever is raised; on_lease_lost stops them."""

    def __init__(self, library: str = "") -> None:
        self.arms = [
            SimulatedArmClient(info.address, f"{self.get_name()} {os.getpid()}") for info in self.hardware_infos
        ]
        self.library = library

    def processes(self) -> tuple[int, int, int]:
        return processes()

    def move(self) -> None:
        for arm in self.arms:
            arm.move(1.0)

    def stream(self) -> None:
        while True:
            with contextlib.suppress(Exception):
                self.move()
                time.sleep(CYCLE_S)

    def moves(self) -> None:
        self.stream()

    def on_lease_lost(self) -> None:
        for arm in self.arms:
            arm.stop()


class Starting(Streamer):
    """Its constructor moves the arm and does not come to an end."""

    def __init__(self, library: str = "") -> None:
        super().__init__(library)
        self.stream()


class Beside(Streamer):
    """A thread of its own moves the arm, and lets nothing end it."""

    def moves(self) -> None:
        threading.Thread(target=self._moves_on, daemon=True).start()

    def _moves_on(self) -> None:
        while True:
            try:
                self.move()
                time.sleep(CYCLE_S)
            except BaseException:  # noqa: BLE001
                continue


class Concurrent(Streamer):
    """A method with a thread of its own moves the arm, and lets nothing end it."""

    @Worker.concurrent()
    def moves(self) -> None:
        while True:
            try:
                self.move()
                time.sleep(CYCLE_S)
            except BaseException:  # noqa: BLE001
                continue


class Generating(Streamer):
    """A generator moves the arm between two items, and would once more when it is closed."""

    def moves(self) -> Iterator[int]:  # type: ignore[override]
        try:
            yield 1
            self.stream()
        finally:
            self.move()


class Async(Streamer):
    async def moves(self) -> None:  # type: ignore[override]
        import asyncio

        while True:
            self.move()
            await asyncio.sleep(CYCLE_S)


class Masked(Streamer):
    def moves(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        self.stream()


class Forking(Streamer):
    """A child moves the arm too."""

    def moves(self) -> None:
        if not os.fork():
            self.stream()
        self.stream()


class DoubleForking(Streamer):
    def moves(self) -> None:
        if not os.fork():
            os.setsid()
            if not os.fork():
                self.stream()
            os._exit(0)
        self.stream()


class Popening(Streamer):
    def moves(self) -> None:
        fd = self.arms[0].fileno()
        code = f"import os, time\nwhile True: os.write({fd}, b'move 2.0\\n'); time.sleep({CYCLE_S})"
        subprocess.Popen([sys.executable, "-c", code], pass_fds=[fd])
        self.stream()


class Uninterruptible(Streamer):
    """A child is in an uninterruptible call: it waits for its own child's exec, and that one for a FIFO's writer."""

    def moves(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            os.mkfifo(f"{folder}/fifo")
            reader = os.open(f"{folder}/fifo", os.O_RDONLY | os.O_NONBLOCK)
        if not os.fork():
            for arm in self.arms:
                os.close(arm.fileno())
            action = (os.POSIX_SPAWN_OPEN, 0, f"/proc/self/fd/{reader}", os.O_RDONLY, 0)
            os.posix_spawn(sys.executable, [sys.executable], {}, file_actions=[action])
        self.stream()


class Native(Streamer):
    """A loop in C that does not hold the interpreter's lock."""

    def moves(self) -> None:
        self._native(ctypes.CDLL(self.library), 1 << 30)

    def _native(self, library: Any, cycles: int) -> None:
        page, fd = ctypes.c_void_p(self.lease_page.address), self.arms[0].fileno()
        while True:
            library.stream(page, fd, cycles)


class NativeWithLock(Native):
    """The same, and holds it for half a second at a time."""

    def moves(self) -> None:
        self._native(ctypes.PyDLL(self.library), int(0.5 / CYCLE_S))


class HookBlocks(Streamer):
    def on_lease_lost(self) -> None:
        super().on_lease_lost()
        threading.Event().wait()


class HookRaises(Streamer):
    def on_lease_lost(self) -> None:
        super().on_lease_lost()
        raise RuntimeError("the arm does not answer")


class HookCalls(Streamer):
    """Its hook talks to others, which may not be there any more."""

    def on_lease_lost(self) -> None:
        super().on_lease_lost()
        for call in (
            lambda: self.send("stopped", "nobody", 0),
            lambda: self.connect_channel("none"),
            lambda: self.check_worker_alive("nobody:0"),
        ):
            with contextlib.suppress(Exception):
                call()


def main() -> None:
    """The driver."""
    config = json.loads(sys.argv[1])
    works: list[Any] = []
    with Cluster(cluster_cfg=config["cluster"], timeout=60) as cluster:
        say({"ready": os.getpid()})
        for line in sys.stdin:
            order = json.loads(line)
            strategy = ComponentPlacement(config, cluster).get_strategy(order["component"])
            group: Any = globals()[order["class"]].create_group(config["library"])
            group = group.launch(cluster, strategy, name=order["group"], **order.get("options", {}))
            if order["class"] == "Starting":
                works.append(group)
                say({"group": order["group"]})
                continue
            pids = group.processes().wait()[0]
            works.append(group.moves())
            say({"group": order["group"], "pids": pids})
    os._exit(0)


def say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)
