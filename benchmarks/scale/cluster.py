"""One simulated cluster: starts its processes, gives them orders, and measures."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmarks.scale.agent_processes import SPARE_DESCRIPTORS, AgentProcesses
from benchmarks.scale.folder import folder_of_run
from benchmarks.scale.roles import Answer, Head, Measured, Role
from benchmarks.timing import clock
from rlinf_actors.settings import CLIENT_CONFIG, HEADS_DIR, INSECURE_TEST_NETWORK, RELAY_FROM

PHASES = ("join", "idle", "launch", "beats", "deaths", "node", "restart", "driver")
"""The phases, in their order. Each needs the ones before it, except that idle, beats, deaths, node and restart may be
left out.
"""
KILLED = 200
FAN_OUTS = 11


@dataclass(frozen=True)
class Size:
    """The size and the settings of a simulated cluster.

    Attributes:
        agents: number of agents.
        per_agent: workers of each.
        keys: True if the head and all members have keys (CURVE).
        load_s: seconds over which the CPU time of the head is measured.
        limit_s: seconds that a phase may take.
        phases: the phases to run.
    """

    agents: int
    per_agent: int = 10
    keys: bool = False
    load_s: float = 10.0
    limit_s: float = 120.0
    phases: Sequence[str] = PHASES

    @property
    def workers(self) -> int:
        return self.agents * self.per_agent


def measure(size: Size, show: Callable[[str, Answer], object]) -> dict[str, Answer]:
    """Run the phases in turn. Return the figures of each; call *show* with them as they come.

    A phase that fails has the figure ``error``, and ends the run.
    """
    figures: dict[str, Answer] = {}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(folder_of_run())
        simulation = stack.enter_context(contextlib.closing(Simulation(size, folder)))
        for phase in PHASES:
            if phase not in size.phases:
                continue
            try:
                figures[phase] = getattr(simulation, phase)()
            except Exception as error:  # noqa: BLE001 - it is reported among the figures
                figures[phase] = {"error": f"{type(error).__name__}: {error}"}
                break
            finally:
                show(phase, figures.get(phase, {}))
    return figures


class Simulation:
    """The processes of one simulated cluster. Each method with the name of a phase runs that phase."""

    def __init__(self, size: Size, folder: str) -> None:
        self._size = size
        self._folder = folder
        self._state = f"{folder}/state"
        self._environment = {
            "XDG_CONFIG_HOME": folder,
            HEADS_DIR: f"{folder}/heads",
            CLIENT_CONFIG: f"{folder}/client.toml",
            INSECURE_TEST_NETWORK: "" if size.keys else "1",
            RELAY_FROM: "0",  # the simulated workers have no unix sockets, by which relays would reach them
        }
        open(self._environment[CLIENT_CONFIG], "x").close()
        os.mkdir(self._environment[HEADS_DIR])
        check_descriptors(size.agents, "the head has a connection to each agent")
        self._processes: list[Measured] = []
        self._head = self._start_head("127.0.0.1:0")
        self._empty_mb = self._head.rss_mb
        self._agents = AgentProcesses(
            lambda *of: self._start("agents", self._endpoint, folder, *of), size.agents, size.per_agent
        )

    @property
    def _endpoint(self) -> str:
        return f"tcp://{self._head.address}"

    def _start_head(self, address: str) -> Head:
        head = Head(address, self._state, environment=self._environment, log=f"{self._folder}/head.log")
        self._processes.append(head)
        return head

    def _start(self, module: str, *arguments: object) -> Role:
        role = Role(module, *arguments, environment=self._environment, log=f"{self._folder}/{module}.log")
        self._processes.append(role)
        return role

    def close(self) -> None:
        for process in self._processes:
            process.end()

    # --- phases ---

    def join(self) -> Answer:
        cpu = self._head.cpu_s
        joined = self._agents.registrations("join", limit_s=self._size.limit_s)
        head = {"head_cpu_s": self._head.cpu_s - cpu, "head_mb": self._head.rss_mb, "head_empty_mb": self._empty_mb}
        return {**joined, **head, "head_descriptors": self._head.descriptors}

    def idle(self) -> Answer:
        time.sleep(min(2.0, self._size.load_s))  # what the joins have left to do
        return self._load(self._size.load_s)

    def launch(self) -> Answer:
        self._observer = self._start("observer", self._endpoint)
        self._observer.ask("connect")
        nodes = self._observer.ask("get_nodes", count=self._size.agents)
        cpu = self._head.cpu_s
        launched = self._observer.ask("launch", group="all", workers=self._size.workers, nodes=self._size.agents)
        spent = self._head.cpu_s - cpu
        each = spent / self._size.workers * 1e6
        return {"get_nodes_s": nodes["answer_s"], **launched, "head_cpu_s": spent, "head_us_per_worker": each}

    def beats(self) -> Answer:
        return self._load(self._size.load_s)

    def deaths(self) -> Answer:
        """Kill some workers one after another, then all workers of one node."""
        count = max(1, min(KILLED, self._size.workers // 4))
        one_by_one = self._announced(self._agents.kill_workers(count, pause_s=0.02))
        at_once = self._announced(self._agents.ask_of("kill_workers_of", self._size.agents // 2))
        return {
            "p50_ms": statistics.median(one_by_one) * 1e3,
            "p99_ms": percentile(one_by_one, 0.99) * 1e3,
            "node_at_once_ms": max(at_once) * 1e3,
        }

    def node(self) -> Answer:
        """Lose a node without a word: its workers' ends are announced when its lease has ended."""
        node = self._size.agents - 1
        lost = self._announced(self._agents.ask_of("lose", node))
        self._agents.ask_of("rejoin", node, limit_s=self._size.limit_s)
        return {"announced_s": max(lost)}

    def restart(self) -> Answer:
        """Kill the head, and start it again one second later."""
        self._agents.ask_all("forget")
        self._head.end(signal.SIGKILL)
        time.sleep(1)
        self._head = self._start_head(self._head.address)
        cpu, start = self._head.cpu_s, clock()
        returned = self._agents.registrations("returned", since=start, limit_s=self._size.limit_s)
        busy = {"head_cpu_s": self._head.cpu_s - cpu, "head_mb": self._head.rss_mb}
        after = self._load(min(5.0, self._size.load_s))
        return {**returned, **busy, "after_cpu_percent": after["head_cpu_percent"]}

    def driver(self) -> Answer:
        """Let a script launch on all nodes. The observer's group, which is there, goes on."""
        check_descriptors(self._size.workers, "the driver has a connection to each worker")
        driver = self._start("driver", self._head.address, self._size.agents)
        figures = driver.ask("connect")
        cpu = self._head.cpu_s
        figures |= driver.ask("launch", workers=self._size.workers, limit_s=self._size.limit_s)
        figures["head_cpu_s"] = self._head.cpu_s - cpu
        figures |= driver.ask("fan_out", calls=FAN_OUTS)
        return figures | driver.ask("end")

    # --- measuring ---

    def _load(self, seconds: float) -> Answer:
        head, agents, start = self._head.cpu_s, self._agents.cpu_s, clock()
        time.sleep(seconds)
        share = 100 / (clock() - start)
        return {
            "head_cpu_percent": (self._head.cpu_s - head) * share,
            "agents_cpu_percent": (self._agents.cpu_s - agents) * share,
            "head_mb": self._head.rss_mb,
        }

    def _announced(self, ended: dict[str, float]) -> list[float]:
        """Return the seconds from each worker's end until the observer had the notice of it."""
        gone = self._observer.ask("gone", ids=list(ended))
        return [gone[id] - at for id, at in ended.items()]


def check_descriptors(connections: int, why: str) -> None:
    """Raise RuntimeError if a process may not have so many connections. *why* says which process needs them."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if connections + SPARE_DESCRIPTORS > most:
        raise RuntimeError(
            f"{why}, {connections}, and the hard limit is {most} file descriptors for each process: raise it "
            "(ulimit -Hn), simulate fewer agents or workers, or leave the phase out (--skip)"
        )


def percentile(values: Iterable[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
