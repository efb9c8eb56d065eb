"""The processes of a chaos run: its cluster, its drivers, and the faults applied to them."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from chaos_invariants import SCENE
from chaos_plan import LATE_S, Plan, Strike
from chaos_record import Record

import rlinf_actors
from rlinf_actors import procfs
from rlinf_actors.cluster.local_daemon import processes_with
from rlinf_actors.errors import RlinfActorsError
from rlinf_actors.settings import LOST_ERRORS, TEST_MARK
from rlinf_actors.testing import faults
from rlinf_actors.testing.local_cluster import LocalCluster

NODES, DRIVERS = 3, 2
"""The first node has the head, and no workers."""
BEAT_S, LEASE_S = 0.2, 3.0
END_S = 120.0
"""Time limit for a driver's end."""


class Scene:
    """All processes of the run. It has one thread; starts that have to wait run on others.

    Args:
        folder: of records, drivers' output and switches.
        plan: what happens.
    """

    def __init__(self, folder: str, plan: Plan) -> None:
        self._folder = folder
        self._plan = plan
        self._record = Record(folder, SCENE)
        self._local = LocalCluster(
            NODES,
            env=self._environment(),
            options={"timers": {"beat_s": BEAT_S, "lease_s": LEASE_S}},
        )
        self._drivers: dict[str, subprocess.Popen[bytes]] = {}
        self._numbers = itertools.count(1)
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._starts = ThreadPoolExecutor(NODES, thread_name_prefix="chaos-start")
        self._starting: dict[int, Future[None]] = {}
        self.problems: list[str] = []

    def _environment(self) -> dict[str, str]:
        """Switches, for every process by its pid."""
        slow, cut = f"{self._folder}/slow.{{pid}}", f"{self._folder}/cut.{{pid}}"
        ways = ("transport.send", "transport.receive")
        return faults.environment(
            *(faults.fault(way, faults.delay(LATE_S), exists=slow) for way in ways),
            *(faults.fault(way, faults.cut(), exists=cut) for way in ways),
        )

    # --- life ---

    def start(self) -> None:
        """Start the cluster and the drivers."""
        self._local.start()
        for _ in range(DRIVERS):
            self._start_driver()

    def run(self, seconds: float, every: float) -> None:
        """Apply a fault every *every* seconds. Blocks."""
        end = time.monotonic() + seconds
        struck = time.monotonic()
        while time.monotonic() < end:
            struck += every
            self._wait_until(min(struck, end))
            if struck < end:
                self._strike(self._plan.next())

    def stop(self) -> None:
        """Undo faults, end the drivers in good order, then the cluster."""
        while self._due:
            self._wait_until(self._due[0][0])
        for start in list(self._starting.values()):
            start.result()
        self._look()
        for driver in self._drivers.values():
            assert driver.stdin is not None
            driver.stdin.close()
        deadline = time.monotonic() + END_S
        for name, driver in list(self._drivers.items()):
            try:
                driver.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                driver.send_signal(signal.SIGUSR1)  # its stacks are in its output then
                self.problems.append(f"driver {name} does not end: {self._output(name)}")
                with contextlib.suppress(subprocess.TimeoutExpired):
                    driver.wait(1.0)
                driver.kill()
        self._look()

    def close(self) -> None:
        """Kill all remaining processes."""
        for driver in self._drivers.values():
            driver.kill()
            with driver:
                pass
        self._starts.shutdown()
        self._local.stop()
        self._record.close()

    def _start_driver(self) -> None:
        name = f"d{next(self._numbers)}"
        root = str(Path(rlinf_actors.__file__).resolve().parent.parent)
        paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        script = str(Path(__file__).with_name("chaos_load.py"))
        with open(self._out(name), "wb") as out:
            self._drivers[name] = subprocess.Popen(
                [sys.executable, script, self._local.head, self._folder, name, str(NODES)],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                env={
                    **os.environ,
                    **self._local.driver_env,
                    **self._environment(),
                    "PYTHONPATH": paths,
                    LOST_ERRORS: "log",
                },
                start_new_session=True,
            )

    def _out(self, name: str) -> str:
        return f"{self._folder}/{name}.out"

    def _output(self, name: str) -> str:
        return "\n".join(Path(self._out(name)).read_text(errors="replace").splitlines()[-20:])

    # --- time ---

    def _later(self, seconds: float, action: Callable[[], object]) -> None:
        heapq.heappush(self._due, (time.monotonic() + seconds, next(self._numbers), action))

    def _wait_until(self, when: float) -> None:
        """Let time pass; run due actions and record ends of drivers."""
        while True:
            now = time.monotonic()
            while self._due and self._due[0][0] <= now:
                heapq.heappop(self._due)[2]()
            self._look()
            if now >= when:
                return
            until = min(when, self._due[0][0]) if self._due else when
            with contextlib.ExitStack() as stack:
                fds = []
                for driver in self._drivers.values():
                    fds.append(os.pidfd_open(driver.pid))
                    stack.callback(os.close, fds[-1])
                select.select(fds, (), (), max(0.0, until - now))

    def _look(self) -> None:
        """Record ended drivers and the results of starts."""
        for name, driver in list(self._drivers.items()):
            code = driver.poll()
            if code is not None:
                self._ended(name, driver)
                if code:
                    self.problems.append(f"driver {name} ended with {code}: {self._output(name)}")
        for rank, start in list(self._starting.items()):
            if start.done():
                del self._starting[rank]
                try:
                    start.result()
                except (RlinfActorsError, TimeoutError) as error:
                    self.problems.append(f"the agentd of node {rank} does not come back: {error}")

    def _ended(self, name: str, driver: subprocess.Popen[bytes]) -> None:
        self._record.write("ended", pid=driver.pid, who=name)
        del self._drivers[name]
        with driver:
            pass

    # --- faults ---

    def _strike(self, strike: Strike) -> None:
        targets = self._targets(strike.whom)
        if not targets:
            return
        pid = sorted(targets)[int(strike.pick * len(targets))]
        self._record.write("fault", kind=strike.kind, pid=pid, who=targets[pid], seconds=strike.seconds)
        try:
            if strike.how == "kill":
                self._kill(strike, pid, targets[pid])
            elif strike.how == "stop":
                pidfd = procfs.pidfd_of(pid)
                signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
                self._later(strike.seconds, lambda: _continue(pidfd))
            else:
                switch = Path(self._folder, f"{strike.how}.{pid}")
                switch.touch()
                self._later(strike.seconds, lambda: switch.unlink(missing_ok=True))
        except ProcessLookupError:
            return  # it has just ended by itself

    def _kill(self, strike: Strike, pid: int, name: str) -> None:
        if strike.whom == "driver":
            driver = self._drivers[name]
            driver.kill()
            driver.wait()
            self._ended(name, driver)
            self._later(strike.seconds, self._start_driver)
        elif strike.whom in ("agentd", "head"):
            rank = int(name)
            self._local.kill_agent(rank)
            self._later(strike.seconds, lambda: self._restart(rank))
        else:
            os.kill(pid, signal.SIGKILL)

    def _restart(self, rank: int) -> None:
        self._starting[rank] = self._starts.submit(self._local.restart_agent, rank, END_S)

    def _targets(self, whom: str) -> Mapping[int, str]:
        """Maps pids to names."""
        if whom == "driver":
            return {driver.pid: name for name, driver in self._drivers.items()}
        if whom in ("agentd", "head"):
            ranks = (0,) if whom == "head" else range(1, NODES)
            alive = [rank for rank in ranks if rank not in self._starting and self._local.nodes[rank].alive]
            return {self._local.nodes[rank].pid: str(rank) for rank in alive}
        found = {}
        drivers = {driver.pid for driver in self._drivers.values()}
        # not only our descendants: a template outlives its agentd
        for pid in processes_with(TEST_MARK, os.environ[TEST_MARK]):
            if pid in drivers:
                continue
            mark = procfs.mark_of(pid)
            if mark is not None and mark.startswith("-") == (whom == "template"):
                found[pid] = "template" if whom == "template" else mark
        return found


def _continue(pidfd: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGCONT)
    os.close(pidfd)
