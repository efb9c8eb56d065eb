"""Worker classes and small helpers of the live tests. Importable in workers: pytest puts this directory on sys.path."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlinf_actors import Cluster, NodePlacementStrategy, Worker, WorkerGroup, procfs

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT_ENV = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
"""For scripts that a test runs: the project need not be installed."""


def wait_for_end(pidfd: int, timeout: float = 60.0) -> None:
    """Wait until the process of a pidfd has ended; closes it."""
    ended, _, _ = select.select([pidfd], [], [], timeout)
    os.close(pidfd)
    assert ended, "the process did not end"


def running(pid: int) -> bool:
    """Whether a process exists and has not ended (an orphan that nobody reaps is a zombie for ever)."""
    found = procfs.stat(pid)
    return found is not None and not found.ended


def template_of(worker: int) -> int:
    """The pid of a worker's template; a robot worker has a watchdog in between."""
    parent = procfs.stat(worker).parent
    is_watchdog = procfs.text_of(f"/proc/{parent}/comm").startswith("rlinf-watchdog")
    return procfs.stat(parent).parent if is_watchdog else parent


def agentd_of(worker: int) -> int:
    """The pid of a worker's agentd: it started the keeper, which started the template."""
    keeper = procfs.stat(template_of(worker)).parent
    return procfs.stat(keeper).parent


def on_every_node(cluster: Cluster, cls: type, *args: Any, name: str | None = None, **options: Any) -> Any:
    """One worker on each node."""
    strategy = NodePlacementStrategy(list(range(cluster.num_nodes)))
    return cls.create_group(*args).launch(cluster, strategy, name=name, **options)


def many(cluster: Cluster, cls: type, count: int, *args: Any, name: str | None = None, **options: Any) -> Any:
    """*count* workers on node 0."""
    return cls.create_group(*args).launch(cluster, NodePlacementStrategy([0] * count), name=name, **options)


def dedent(source: str) -> str:
    """Source in a test, as a module."""
    return textwrap.dedent(source)


def script(tmp_path: Path, source: str) -> Path:
    """A file of its own for a driver."""
    path = tmp_path / "driver.py"
    path.write_text(source)
    return path


def run_script(tmp_path: Path, source: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a driver script to its end."""
    return subprocess.run(
        [sys.executable, script(tmp_path, source)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**SCRIPT_ENV, **env},
    )


class Where(Worker):
    """Says where it is, blocks, and leaves children behind."""

    def where(self) -> tuple[int, int]:
        return self._cluster_node_rank, os.getpid()

    def block(self) -> None:
        threading.Event().wait()

    def leave_child(self) -> int:
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True).pid


class Greeter(Worker):
    def __init__(self, greeting: str = "hello", fail_on: int = -1) -> None:
        super().__init__()
        self.greeting = greeting
        if self._rank == fail_on:
            raise ValueError(f"no greeting on rank {fail_on}")

    def greet(self, name: str = "you") -> str:
        return f"{self.greeting} {name} from {self._rank}"

    def bad(self, rank: int = 0) -> str:
        if self._rank == rank:
            raise ValueError("that was bad")
        return "fine"

    def custom(self) -> None:
        raise OddError(3, where="here")

    def environ(self) -> dict[str, str]:
        return dict(os.environ)

    def echo(self, value: Any) -> Any:
        return value

    def say(self, text: str) -> None:
        print(text, flush=True)

    def complain(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def log(self, text: str) -> None:
        self.log_info(text)

    def block(self) -> None:
        threading.Event().wait()

    def spin(self) -> None:
        while True:
            pass

    def wait_for_fifo(self, path: str) -> None:
        Path(path).read_bytes()

    def exits(self, code: int) -> None:
        print("last words", file=sys.stderr, flush=True)
        os._exit(code)

    def kills_itself(self, number: int = signal.SIGKILL) -> None:
        print("last words", file=sys.stderr, flush=True)
        os.kill(os.getpid(), number)
        threading.Event().wait()

    def about(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "main": threading.current_thread() is threading.main_thread(),
            "threads": sorted(thread.name for thread in threading.enumerate()),
            "session": os.getsid(0) == os.getpid(),
            "stdin": os.readlink("/proc/self/fd/0"),
            "current": Worker.current_worker is self,
            "executable": sys.executable,
        }

    def attributes(self) -> dict[str, Any]:
        names = (
            "_rank", "_world_size", "_group_name", "_worker_name", "_cluster_node_rank", "_node_local_rank",
            "_node_local_world_size", "_local_rank", "_local_world_size", "_local_accelerator_rank",
            "_accelerator_type", "_accelerator_model", "_local_hardware_ranks",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}

    def ports(self, count: int) -> list[int]:
        return [self.acquire_free_port() for _ in range(count)]

    def can_bind(self, port: int) -> bool:
        with socket.socket() as plain:
            try:
                plain.bind(("127.0.0.1", port))
            except OSError:
                return False
            return True

    def release(self, port: int) -> None:
        self.release_free_port(port)

    def ephemeral_ports(self, count: int) -> list[int]:
        made = [socket.socket() for _ in range(count)]
        for one in made:
            one.bind(("127.0.0.1", 0))
        ports = [one.getsockname()[1] for one in made]
        for one in made:
            one.close()
        return ports

    def timed(self) -> None:
        with self.worker_timer("inner"):
            pass

    @Worker.timer()
    def timed_by_decorator(self) -> None: ...

    def who(self) -> Any:
        return self.worker_info

    def alive(self, name: str) -> bool:
        return self.check_worker_alive(name)


class Eater(Worker):
    """Takes memory, and keeps it."""

    def eat(self, mib: int) -> int:
        self.held = [bytearray(1 << 20) for _ in range(mib)]
        return len(self.held)


class OddError(ValueError):
    """One whose constructor takes other arguments than it passes on."""

    def __init__(self, code: int, *, where: str) -> None:
        super().__init__(f"{code} at {where}")
        self.code = code


class ExitsInInit(Worker):
    def __init__(self, how: str) -> None:
        super().__init__()
        print("dying in __init__", file=sys.stderr, flush=True)
        if how == "exit":
            os._exit(7)
        if how == "sys.exit":
            sys.exit(8)
        os.kill(os.getpid(), signal.SIGKILL)

    def anything(self) -> None: ...


class Looped(Worker):
    """Has async methods: everything on one event loop."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.made = 0
        self.loop = asyncio.get_running_loop()
        self.cancelled = asyncio.Event()

    async def wait_for_gate(self) -> str:
        await self.gate.wait()
        return "through"

    async def open_gate(self) -> None:
        self.gate.set()

    def plain(self) -> bool:
        return asyncio.get_running_loop() is self.loop and threading.current_thread() is threading.main_thread()

    async def forever(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()

    async def was_cancelled(self) -> bool:
        return await self.cancelled.wait()

    async def numbers(self, n: int):
        try:
            for k in range(n):
                self.made = k + 1
                yield k
        finally:
            self.cancelled.set()

    async def arrays(self, n: int):
        import numpy as np

        for k in range(n):
            yield np.full(50_000, k)

    async def dries_up(self):
        yield 1
        raise ValueError("dry")

    def made_so_far(self) -> int:
        return self.made


class Caller(Worker):
    """Uses the cluster from inside a worker."""

    def call(self, group: str) -> list[str]:
        return WorkerGroup.from_group_name(Greeter, group).greet("worker").wait()

    def call_self(self) -> Any:
        return WorkerGroup.from_group_name(Caller, self._group_name).call_self().wait()

    def cluster(self) -> tuple[int, str, bool]:
        cluster = Cluster()
        return cluster.num_nodes, cluster.namespace, Cluster.has_initialized()

    def launch_group(self, name: str) -> list[str]:
        group = Greeter.create_group("nested").launch(Cluster(), name=name)
        return group.greet().wait()

    def fail_through(self, group: str) -> None:
        WorkerGroup.from_group_name(Greeter, group).bad().wait()


class Reducer(Worker):
    def all_reduce(self) -> float:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        total = torch.tensor([float(self._rank + 1)])
        dist.all_reduce(total)
        dist.destroy_process_group()
        return float(total.item())


class Child(Worker):
    def __init__(self, parent_address: Any, world_size: int, rank: int) -> None:
        super().__init__(parent_address=parent_address, world_size=world_size, rank=rank)


class Parent(Worker):
    def fork_child(self) -> str:
        """What a child process of this one is."""
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            child = Child(self.worker_address, 4, 2)
            os.write(write, f"{child.get_name()} of {child._world_size}".encode())
            os._exit(0)
        os.close(write)
        said = os.read(read, 1000).decode()
        os.close(read)
        os.waitpid(pid, 0)
        return said


class Stuck(Worker):
    """Stands still, in its constructor or in a call, and tells by a named pipe when it does."""

    def __init__(self, pipe: str, at: str) -> None:
        super().__init__()
        self._pipe = pipe
        if at == "init":
            self.stand_still()

    def stand_still(self) -> None:
        with open(self._pipe, "w") as pipe:
            pipe.write(str(os.getpid()))
        threading.Event().wait()


class Closes(Worker):
    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = Path(path)

    def ready(self) -> bool:
        return True

    def _close(self) -> None:
        self.path.write_text("closed")


class Forker(Worker):
    """Starts more than it may."""

    def start(self, what: str, count: int) -> None:
        over, made, children = threading.Event(), [], []
        try:
            for _ in range(count):
                if what == "threads":
                    thread = threading.Thread(target=over.wait, daemon=True)
                    thread.start()
                    made.append(thread)
                else:
                    children.append(subprocess.Popen(["sleep", "1000"]))
        finally:
            over.set()
            for thread in made:
                thread.join()
            for child in children:
                child.kill()
                child.wait()


class Stopped(Worker):
    """Stops the event loop that its calls run on."""

    async def stop(self) -> None:
        asyncio.get_running_loop().stop()
        await asyncio.Event().wait()


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop a child of this process by SIGSTOP for the length of the block."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
