"""Hosts in network namespaces: a head alone, labs with an agentd and arms each, and drivers beside them.

`play_rounds` repeats what a module of tests does there, and judges each row.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parent.parent
sys.path += [str(HERE.parent / "netns"), str(HERE.parent / "live")]

import netns_kit  # noqa: E402
import pace  # noqa: E402
from nightly import Figures  # noqa: E402
from robot_kit import until  # noqa: E402

from rlinf_actors.testing.simulated_arm import Command, read_record  # noqa: E402
from rlinf_actors.testing.simulated_arm_hardware import HW_TYPE  # noqa: E402

STILL_S = 2.4
"""For how long a process stands still: longer than a robot's lease."""
ATTEMPTS = 20
"""So often a row is played, before the machine is said to be too slow for it."""
GUARDED_S = 0.2
"""A guard that is late by so much is killed, and its hook does not run."""
PATH = os.pathsep.join(map(str, (PROJECT, HERE)))
ENOUGH = 5
"""So many moves say that a worker streams."""
CONTROL = """
import sys, time
while True:
    begun = time.monotonic()
    time.sleep(0.002)
    late = time.monotonic() - begun - 0.002
    if late > 0.002:
        print(begun, late, flush=True)
"""
"""Says when the machine stood still, and for how long."""


@dataclass(frozen=True)
class Arm:
    """One arm: where it listens, as its node's configuration has it, its record, and what one worker `said` to it."""

    address: str
    record: Path
    said: Sequence[Command] = ()

    def commands(self) -> list[Command]:
        return read_record(self.record)

    def until(self, fact: Callable[[list[Command]], bool], what: str) -> list[Command]:
        """Wait for a fact about the record."""
        return until(self.record, fact, what, pace.PATIENCE_S)


@dataclass(frozen=True)
class Row:
    """One thing that goes wrong.

    Attributes:
        name: also of the worker's group.
        bound_s: of the time to the last command at the arm.
        cls: how the worker moves its arm.
    """

    name: str
    bound_s: float
    cls: str


@dataclass(eq=False)
class Run:
    """One worker that streams, and what becomes of it.

    Attributes:
        worker, watchdog, template: pids of the worker that is hurt; 0 of one whose constructor never ends.
        arms: those that it moves.
        cut: when the fault was (time.monotonic()).
        pressed: when somebody pressed Enter for an emergency stop, 0 if nobody did.
        went_on: when a process that stood still was continued, 0 for none.
        wrong: what was not as promised, "" for nothing.
        told: what was said of it.
        stall: the longest time for which the machine stood still meanwhile.
        last: when the last command came to an arm that had to come in time.
    """

    row: Row
    arms: Sequence[Arm]
    worker: int = 0
    watchdog: int = 0
    template: int = 0
    cut: float = 0.0
    pressed: float = 0.0
    went_on: float = 0.0
    wrong: str = ""
    told: str = ""
    stall: float = 0.0
    last: float = 0.0

    @property
    def name(self) -> str:
        return self.row.name

    @property
    def late_s(self) -> float:
        return self.last - self.cut - self.row.bound_s

    @property
    def unjudged(self) -> bool:
        """The machine itself was late."""
        return not self.wrong and 0 < self.late_s <= self.stall

    def must(self, holds: bool, what: object) -> None:
        if not holds:
            self.wrong = self.wrong or str(what)

    def must_have_stopped(self, texts: Sequence[str]) -> bool:
        """Note it if a worker said no stop. It could not if the machine kept its guard from running."""
        stopped = "stop" in texts
        if not stopped and self.stall > GUARDED_S:
            self.last = self.cut + self.row.bound_s + self.stall
        else:
            self.must(stopped, f"no stop command: {list(texts[-3:])}")
        return stopped

    def of(self, arm: Arm, commands: Sequence[Command]) -> list[Command]:
        """What this worker said to an arm."""
        hello = f"hello {self.name}:0 "
        mine = {one.connection for one in commands if one.text.startswith(hello)}
        return [one for one in commands if one.connection in mine and one.text != "closed"]

    def until_streaming(self) -> None:
        for arm in self.arms:
            arm.until(lambda commands, arm=arm: len(self.of(arm, commands)) > ENOUGH, f"{self.name} streams")  # type: ignore[misc]

    def until_closed(self) -> None:
        """Wait until the worker has no connection to its arms any more. If that does not come, the row fails alone."""

        def closed(arm: Arm, commands: list[Command]) -> bool:
            hello = f"hello {self.name}:0 "
            mine = {one.connection for one in commands if one.text.startswith(hello)}
            return mine <= {one.connection for one in commands if one.text == "closed"}

        for arm in self.arms:
            try:
                arm.until(lambda commands, arm=arm: closed(arm, commands), "its worker has ended")  # type: ignore[misc]
            except AssertionError as error:
                self.must(False, error)


@dataclass
class Driver:
    """A driver's process. `config` is what it gave to its Cluster."""

    process: subprocess.Popen[str]
    config: dict[str, Any]
    host: netns_kit.Host

    def order(self, **what: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the driver has ended:\n{Path(self.config['log']).read_text()[-3000:]}"
        return dict(json.loads(line))


@dataclass
class Scene:
    """The hosts and what runs there. `stack` ends all of it.

    Attributes:
        labs: hosts with an agentd each; their number is the rank.
        arms: of each lab.
        module: of the workers and the driver.
        library: the module's control loop in C, "" where there is no compiler.
    """

    stack: contextlib.ExitStack
    folder: Path
    head_host: netns_kit.Host
    labs: list[netns_kit.Host]
    others: list[netns_kit.Host]
    module: str
    library: str
    head: subprocess.Popen[bytes] = field(init=False)
    agents: list[subprocess.Popen[bytes]] = field(default_factory=list)
    arms: list[list[Arm]] = field(default_factory=list)
    stalls: Path = field(init=False)

    def __post_init__(self) -> None:
        self.stalls = self.folder / "stalls"
        with self.stalls.open("w") as file:
            self.start(None, [sys.executable, "-c", CONTROL], stdout=file)
        self.start_head()
        for rank, lab in enumerate(self.labs):
            folder = self.folder / f"n{rank}"
            folder.mkdir(mode=0o700)
            arguments = ["--run-dir", str(folder), "--log-dir", str(folder / "logs"), "--insecure-test-network"]
            arguments += ["--connect", self.address, "--node-rank", str(rank)]
            self.agents.append(self.start(lab, [sys.executable, "-m", "agentd", *arguments]))

    @property
    def address(self) -> str:
        return f"{self.head_host.ip}:6399"

    def start_head(self) -> None:
        command = [sys.executable, "-m", "rlinf_actors.cli.main", "head", "--listen", self.address]
        command += ["--insecure-test-network", "--state-dir", str(self.folder / "state")]
        self.head = self.start(self.head_host, command)

    def start(self, host: netns_kit.Host | None, command: list[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a process that ends with the scene; what it says goes to one file."""
        env = {**os.environ, "PYTHONPATH": PATH, "RLINF_ACTORS_INSECURE_TEST_NETWORK": "1", "RLINF_HEAD": self.address}
        with (self.folder / "log").open("a") as log:
            options = {"stdin": subprocess.DEVNULL, "stdout": log, **options}
            words = host.command(command) if host is not None else command
            process = subprocess.Popen(words, env=env, stderr=log, **options)
        self.stack.callback(end, process)
        return process

    def start_arms(self, counts: Sequence[int], own: bool) -> None:
        """So many arms in each lab, one at least. *own*: the other hosts cannot reach them."""
        started = []
        for rank, (lab, count) in enumerate(zip(self.labs, counts, strict=True)):
            records = [self.folder / f"arm{rank}-{n}.jsonl" for n in range(count)]
            words = [word for record in records for word in ("--record", str(record))]
            command = [sys.executable, "-m", "rlinf_actors.testing.simulated_arm", "--host", "0.0.0.0", *words]
            started.append((rank, records, self.start(lab, command, stdout=subprocess.PIPE, text=True)))
        for rank, records, process in started:
            host = f"127.0.{rank}.1" if own else self.labs[rank].ip  # the first also when its plug is pulled
            ports = [int(process.stdout.readline().rpartition(":")[2]) for _ in records]
            self.arms.append([Arm(f"{host}:{port}", record) for port, record in zip(ports, records, strict=True)])
            self.stack.callback(process.stdout.close)

    def driver(self, host: netns_kit.Host, labs: Sequence[int], components: dict[str, dict[str, str]]) -> Driver:
        """Start a driver that may use the arms of these labs. Its first answer says that it is connected."""
        groups = [
            {
                "label": f"lab{lab}",
                "node_ranks": lab,
                "hardware": {
                    "type": HW_TYPE,
                    "configs": [{"address": arm.address, "node_rank": lab} for arm in self.arms[lab]],
                },
            }
            for lab in labs
        ]
        cluster = {"num_nodes": len(self.labs), "node_groups": groups, "component_placement": components}
        config = {"cluster": cluster, "library": self.library, "log": str(self.folder / "log")}
        code = f"import {self.module}; {self.module}.main()"
        process = self.start(
            host, [sys.executable, "-c", code, json.dumps(config)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        return Driver(process, config, host)

    def press(self, *words: str, **options: Any) -> subprocess.Popen[Any]:
        """Start `rlinf-actors estop`."""
        command = [sys.executable, "-m", "rlinf_actors.cli.main", "estop", "--head", self.address, *words]
        return self.start(self.head_host, command, **options)

    def busy(self, count: int) -> list[subprocess.Popen[Any]]:
        """Processes that do nothing but take time."""
        return [self.start(None, [sys.executable, "-c", "while True: pass"]) for _ in range(count)]

    def told(self, name: str) -> str:
        """What drivers, agentds and the head said of a worker."""
        return "\n".join(line for line in (self.folder / "log").read_text().split("\n") if f"{name}:0" in line)

    def stall(self, begun: float, ended: float) -> float:
        """The longest time for which the machine stood still between these times, as the control timer saw it."""
        whole = self.stalls.read_text().split("\n")[:-1]
        lines = [(float(at), float(late)) for at, late in (line.split() for line in whole)]
        return max((late for at, late in lines if at < ended and at + late > begun), default=0.0)


def end(process: subprocess.Popen[Any]) -> None:
    """It may stand still."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGCONT)
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def scene(
    stack: contextlib.ExitStack, labs: int, others: int, arms: Sequence[int], module: str, source: str, own: bool = True
) -> Scene:
    """Start one. *others* are hosts without an agentd, for drivers; *source* is the control loop in C of *module*."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rm", dir="/tmp")))
    hosts = stack.enter_context(netns_kit.hosts(1 + labs + others))
    library = ""
    if shutil.which("cc"):
        text, library = folder / "loop.c", str(folder / "loop.so")
        text.write_text(source)
        include = PROJECT / "rlinf_actors" / "include"
        subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-I", include, "-o", library, text], check=True)
    made = Scene(stack, folder, hosts[0], hosts[1 : 1 + labs], hosts[1 + labs :], module, library)
    made.start_arms(arms, own)
    return made


Results = dict[str, list[Run]]
"""What became of each row in each round."""


def play_rounds(rows: Sequence[Row], count: int, play: Callable[[Collection[Row]], Sequence[Run]]) -> Results:
    """Play the rows so many times. A row that the machine was too slow for is played again alone, until it is judged.

    *play* plays the rows that it is given, of which it may leave out some, and judges them.
    """
    found: Results = {row.name: [] for row in rows}
    for _ in range(count):
        for run in play(rows):
            for _ in range(ATTEMPTS):
                if not run.unjudged:
                    break
                (run,) = play([run.row])
            found[run.name].append(run)
    return found


def check(row: Row, results: Results, figures: Figures, rounds: int) -> None:
    """Fail if one run of *row* was not as promised. Note the longest."""
    runs = results[row.name]
    figures.done(len(runs), rounds, "rounds")
    for run in runs:
        assert not run.wrong, f"{run.wrong}\n{run.told}"
        assert run.late_s <= 0, (
            f"the last command came {run.last - run.cut:.3f} s after the cut; {row.bound_s} s are allowed, and the "
            f"machine itself stood still for {run.stall:.3f} s of that by a control timer"
        )
    assert runs
    longest = max(run.last - (run.pressed or run.cut) for run in runs)
    figures.add(f"{row.name}, longest of {len(runs)}", f"{longest:.3f} s")
