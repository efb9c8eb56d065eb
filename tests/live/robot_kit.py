"""Simulated arms and the workers that stream to them. Importable in workers."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlinf_actors import Cluster, NodePlacementStrategy, Worker
from rlinf_actors.testing import simulated_arm_hardware
from rlinf_actors.testing.simulated_arm import Command, SimulatedArmClient, read_record

ROOT = Path(__file__).resolve().parents[2]


def until(
    record: Path, fact: Callable[[list[Command]], bool], what: str = "", patience_s: float = 60.0
) -> list[Command]:
    """Wait for a fact about an arm's record, which is looked at whenever the arm has written. Return its commands."""
    deadline, commands, rest = time.monotonic() + patience_s, list[Command](), ""
    with (
        record.open() as file,
        subprocess.Popen(["tail", "-n", "+1", "-f", str(record)], stdout=subprocess.PIPE) as tail,
    ):
        assert tail.stdout is not None
        try:
            while True:
                *lines, rest = (rest + file.read()).split("\n")  # what is new alone: an arm writes 200 lines a second
                commands += [Command(one["at"], one["connection"], one["command"]) for one in map(json.loads, lines)]
                if fact(commands):
                    return commands
                left = deadline - time.monotonic()
                assert select.select([tail.stdout], [], [], max(0.0, left))[0], (what, commands[-5:])
                os.read(tail.stdout.fileno(), 1 << 20)
        finally:
            tail.kill()


class Arm:
    """A simulated arm's process and its record; ends with the ``with`` block."""

    def __init__(self, folder: Path, command: Any = list) -> None:
        self.record = folder / "arm.jsonl"
        arguments = [sys.executable, "-m", "rlinf_actors.testing.simulated_arm", "--record", str(self.record)]
        self._process = subprocess.Popen(
            command([*arguments, "--host", "0.0.0.0"]), stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline().rpartition(":")[2])

    def address(self, host: str = "127.0.0.1") -> str:
        return f"{host}:{self.port}"

    def commands(self) -> list[Command]:
        return read_record(self.record)

    def until(self, fact: Any) -> list[Command]:
        """Wait for a fact about the record."""
        return until(self.record, fact)

    def until_streaming(self) -> list[Command]:
        return self.until(lambda commands: sum(one.text.startswith("move") for one in commands) > 5)

    def until_closed(self) -> list[Command]:
        return self.until(lambda commands: any(one.text == "closed" for one in commands))

    def forget(self) -> None:
        """Wait for the end of all connections, then begin the record anew."""

        def all_closed(commands: list[Command]) -> bool:
            closed = {one.connection for one in commands if one.text == "closed"}
            return closed == {one.connection for one in commands}

        self.until(all_closed)
        os.truncate(self.record, 0)  # the arm appends

    def __enter__(self) -> Arm:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def stopped_last(commands: list[Command]) -> None:
    """The last command is stop, nothing after it, and it was sent once."""
    texts = [one.text for one in commands if one.text != "closed"]
    assert any(text.startswith("move") for text in texts)
    assert texts[-1] == "stop", texts[-5:]
    assert texts.count("stop") == 1, texts[-5:]


def config(address: str, node_rank: int = 0, num_nodes: int = 1, place: str = "0") -> dict[str, Any]:
    return {
        "cluster": {
            "num_nodes": num_nodes,
            "component_placement": {"env": {"node_group": "arms", "placement": place}},
            "node_groups": [
                {
                    "label": "arms",
                    "node_ranks": node_rank,
                    "hardware": {
                        "type": simulated_arm_hardware.HW_TYPE,
                        "configs": [{"address": address, "node_rank": node_rank}],
                    },
                }
            ],
        }
    }


class Streamer(Worker):
    """Moves its arm in several ways; on_lease_lost stops it."""

    def __init__(self) -> None:
        self.arm = SimulatedArmClient(self.hardware_infos[0].address, f"{self.get_name()} {os.getpid()}")

    def pid(self) -> int:
        return os.getpid()

    def parent(self) -> int:
        """The pid of the watchdog."""
        return os.getppid()

    def moves(self) -> None:
        """Streams without a pause and lets no exception end it."""
        n = 0
        while True:
            with contextlib.suppress(Exception):
                self.arm.move(n)
                n += 1
                if n % 10 == 0:
                    self.arm.state()

    def moves_asleep(self) -> None:
        for n in range(10):
            self.arm.move(n)
        while True:
            time.sleep(3600)
            self.arm.move(-1)

    def moves_blocked(self) -> None:
        for n in range(10):
            self.arm.move(n)
        while True:
            self.arm.state()
            a, b = os.pipe()
            os.read(a, 1)
            self.arm.move(b)

    def moves_and_breaks(self) -> None:
        """Waits in a breakpoint, to which nobody attaches."""
        for n in range(10):
            self.arm.move(n)
        breakpoint()
        self.arm.move(-1)

    def moves_and_holds_the_gil(self, seconds: int) -> None:
        """Goes into C code with the interpreter's lock, where no thread of this process can run; then moves."""
        for n in range(10):
            self.arm.move(n)
        ctypes.PyDLL(None).sleep(seconds)
        self.arm.move(-1)

    def streams_beside(self) -> None:
        """A thread of the user's own that lets nothing end it."""

        def stream() -> None:
            while True:
                try:
                    self.arm.move(1)
                    time.sleep(0.01)
                except BaseException:  # noqa: BLE001
                    continue

        threading.Thread(target=stream, daemon=True).start()

    def on_lease_lost(self) -> None:
        self.arm.stop()


class Constructing(Streamer):
    def __init__(self) -> None:
        super().__init__()
        self.moves()


class Locked(Streamer):
    """Its main thread stands still with the lock that stopping needs."""

    def moves(self) -> None:
        self.lock = threading.Lock()
        while True:
            with self.lock:
                self.arm.move(1)
                time.sleep(0.01)

    def on_lease_lost(self) -> None:
        with self.lock:
            self.arm.stop()


class Closing(Streamer):
    def _close(self) -> None:
        self.arm.move(0)
        while not self.arm.state()[1]:  # an end with states unread is a reset, which could overtake the command
            pass
        self.arm.close()


class BadlyClosing(Streamer):
    def _close(self) -> None:
        self.arm.move(0)
        raise RuntimeError("not today")


class Raising(Streamer):
    def on_lease_lost(self) -> None:
        self.arm.stop()
        raise RuntimeError("the arm does not answer")


class Hanging(Streamer):
    def on_lease_lost(self) -> None:
        self.arm.stop()
        threading.Event().wait()


class Async(Streamer):
    async def moves(self) -> None:  # type: ignore[override]
        n = 0
        while True:
            self.arm.move(n)
            n += 1
            await asyncio.sleep(0.005 * (n % 3))


class Controller(Worker):
    """Moves the arm that its launcher is placed on, from a thread of its own, as RLinf's controllers do."""

    def __init__(self, address: str) -> None:
        self.arm = SimulatedArmClient(address, f"{self.get_name()} {os.getpid()}")
        threading.Thread(target=self.control, daemon=True).start()

    def control(self) -> None:
        while True:
            self.arm.move(1)
            time.sleep(0.01)

    def held(self) -> bool:
        return self.lease_page.held() and self.lease_page.deadline_ns < 1 << 62

    def on_lease_lost(self) -> None:
        self.arm.stop()


class ClosingController(Controller):
    def _close(self) -> None:
        self.arm.move(0)
        self.arm.close()


class Launching(Worker):
    """Its arm is moved by a group that it launches."""

    def begin(self, node: int, cls: type = Controller, **options: Any) -> bool:
        group = cls.create_group(self.hardware_infos[0].address)  # type: ignore[attr-defined]
        self.group = group.launch(Cluster(), NodePlacementStrategy([node]), name="controller", **options)
        return bool(self.group.held().wait()[0])

    def pid(self) -> int:
        return os.getpid()

    def hang(self) -> None:
        ctypes.PyDLL(None).sleep(3600)

    def on_lease_lost(self) -> None:
        pass


class ClosingLaunching(Launching):
    def __init__(self) -> None:
        self.arm = SimulatedArmClient(self.hardware_infos[0].address, "launcher")

    def _close(self) -> None:
        self.arm.move(7)


class WithHelper(Streamer):
    """Makes a second object of a worker class, as a library may."""

    def __init__(self) -> None:
        super().__init__()
        self.helper = Plain("")


class StoppedOutside(Streamer):
    """No code of the worker stops its arm."""

    def on_lease_lost(self) -> None:
        threading.Event().wait()

    @staticmethod
    def stop_hardware(hardware_infos: list[simulated_arm_hardware.SimulatedArmInfo]) -> None:
        for info in hardware_infos:
            arm = SimulatedArmClient(info.address, "outside")
            arm.stop()
            while arm.state()[1]:  # the stop is confirmed
                pass


class SlowlyStoppedOutside(StoppedOutside):
    @staticmethod
    def stop_hardware(hardware_infos: list[simulated_arm_hardware.SimulatedArmInfo]) -> None:
        time.sleep(0.5)
        StoppedOutside.stop_hardware(hardware_infos)


class AsyncHook(Worker):
    async def on_lease_lost(self) -> None:  # type: ignore[override]
        pass


class Plain(Worker):
    """No robot: its hook never runs."""

    def __init__(self, path: str) -> None:
        self.path = path

    def pid(self) -> int:
        return os.getpid()

    def lease(self) -> tuple[bool, int]:
        self.keep_for_stop(os.getpid())  # asks for nothing
        return self.lease_page.held(), self.lease_page.deadline_ns

    def on_lease_lost(self) -> None:
        Path(self.path).write_text("it ran")


class NoHook(Worker):
    def pid(self) -> int:
        return os.getpid()
