"""The cluster of one `rlinf-actors run`: a head, and an agentd on each node; its start, its program and its end.

The run starts the head on this machine and the agentds by the commands of a Plan: here, by ssh or by srun. Each gets
its order on stdin (model.run_order) and answers on stdout: the head by its address, an agentd by a line of JSON when
its node has registered. The pipe to stdin is what they live by: it closes when this process ends, also by kill -9. Then
each agentd ends its workers and itself, and the head ends the program and removes the directory of the run.

One thread, one selector: pipes, the program's pidfd, and signals (run.signals). The directory of the run has the key of
the program's driver, and the logs, which are kept if the run fails.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import shlex
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from rlinf_actors import procfs, run_dirs
from rlinf_actors.cli.output import note, plain
from rlinf_actors.cli.run import plans, program
from rlinf_actors.cli.run.plans import Plan
from rlinf_actors.cli.run.signals import ENDING, Signals
from rlinf_actors.cluster.local_daemon import RLINF_ACTORS, boot
from rlinf_actors.errors import ClusterTimeoutError, RlinfActorsError
from rlinf_actors.kept_logs import keep
from rlinf_actors.model.run_order import AgentOrder, HeadOrder, NodeOrder
from rlinf_actors.net.head_records import clear_stale
from rlinf_actors.net.host import joined_address
from rlinf_actors.plurals import counted
from rlinf_actors.runtime.progress import Facts, WaitLine, named, those_up
from rlinf_actors.security import keyfile
from rlinf_actors.security.keyfile import KeyFile
from rlinf_actors.security.keypair import KeyPair
from rlinf_actors.settings import (
    CONFIG_FILE,
    FOR_THE_UNIT_ALONE,
    HEAD,
    HEAD_KEY,
    KEY_DIR,
    KEY_FILE,
    LOG_DIR,
    NAMESPACE,
    NODE_RANK,
    NUM_NODES,
    Settings,
)

END_S = 20.0
"""Seconds that the agentds have to end. Robots have made themselves safe long before."""
LOG_LINES = 15
_PIPE_BYTES = 1 << 20
"""Room in the pipe to stdin of a process that starts many agentds, so that writing their order does not block."""
_LABEL = re.compile(rb"^\s*\d+: ")  # of srun --label
_OF_NODES = {HEAD, HEAD_KEY, KEY_DIR, NODE_RANK, NUM_NODES, LOG_DIR, CONFIG_FILE, NAMESPACE, procfs.WORKER_MARK}


@dataclass
class _Child:
    """A process that is told by its stdin, and answers by its stdout. Its stderr goes to a log file."""

    title: str
    names: Sequence[str]
    process: subprocess.Popen[bytes]
    log: Path
    since: float = field(default_factory=time.monotonic)
    _text: bytes = b""

    def tell(self, line: bytes) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: its stdout says so
            os.write(self.process.stdin.fileno(), line + b"\n")

    def heard(self) -> list[bytes] | None:
        """Return the next lines on stdout, None if it is closed. Call it when stdout is readable."""
        assert self.process.stdout is not None
        chunk = os.read(self.process.stdout.fileno(), 1 << 16)
        *lines, self._text = (self._text + chunk).split(b"\n")
        return lines if chunk else None

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def end(self) -> bool:
        """Return True if the process has ended. Otherwise kill it, wait for its end, and return False."""
        assert self.process.stdout is not None
        self.process.stdout.close()
        if self.process.poll() is not None:
            return True
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        return False

    def last_lines(self, number: int = LOG_LINES) -> list[str]:
        return [plain(line) for line in self.log.read_text(errors="replace").splitlines()[-number:]]


class RunCluster:
    """The head and the nodes of a run. Use it in a ``with`` block, which ends them. Main thread."""

    def __init__(self, plan: Plan, signals: Signals, command: Sequence[str]) -> None:
        self._plan = plan
        self._signals = signals
        self._command = command
        self._selector = selectors.DefaultSelector()
        self._dir = self._id = ""
        self._lock = -1
        self._node_dirs: dict[str, str] = {}
        self._agents: list[_Child] = []
        self._head: _Child | None = None
        self._orders: dict[str, NodeOrder] = {}
        self._missing: dict[str, str] = {}  # names of nodes, by node id
        self._address = ""
        self._failure = "the program was not started"
        self._impatient = 0  # signals during the end

    # --- start ---

    def __enter__(self) -> RunCluster:
        try:
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        self._end()

    def _start(self) -> None:
        settings = Settings.load()
        self._dir = run_dirs.make("", settings)
        self._id = os.path.basename(self._dir)
        self._lock = run_dirs.lock(self._dir)
        os.mkdir(f"{self._dir}/logs", 0o700)
        self._selector.register(self._signals, selectors.EVENT_READ)
        head = KeyPair.make()
        keys = Path(self._dir, "keys")
        keyfile.save(keyfile.path_of(keys, "head"), KeyFile("head", "head", head))
        keyfile.save(keyfile.path_of(keys, "driver"), KeyFile("driver", "run", KeyPair.make(), head.public))
        listed: dict[str, str] = {}
        for rank, name in enumerate(self._plan.names):
            pair, node_id = KeyPair.make(), uuid.uuid4().hex[:12]
            listed[pair.public] = name
            self._missing[node_id] = name
            run_dir, log_dir = "", f"{self._plan.log_dir}/{name}" if self._plan.log_dir else ""
            if self._plan.here:
                run_dir = self._node_dirs[name] = run_dirs.make(f"n{rank}-", settings)
                log_dir = log_dir or f"{self._dir}/logs/{name}"
            text = keyfile.text(KeyFile("agent", name, pair, head.public, node=node_id))
            self._orders[name] = NodeOrder(rank, text, run_dir, log_dir)
        env = {key: value for key, value in os.environ.items() if key not in _OF_NODES | FOR_THE_UNIT_ALONE}
        for start in self._plan.starts:  # they load their modules while the head starts
            self._agents.append(self._spawn(start.title, start.names, start.command, env))
        command = [
            sys.executable,
            *boot(RLINF_ACTORS),
            "head",
            "--listen",
            joined_address(self._plan.listen, 0),
            "--of-run",
        ]
        self._head = self._spawn("head", (), command, {**env, KEY_DIR: str(keys)})
        self._head.tell(msgspec.json.encode(HeadOrder(listed, self._id, self._dir, shlex.join(self._command))))

    def _spawn(self, title: str, names: Sequence[str], command: Sequence[str], env: Mapping[str, str]) -> _Child:
        path = Path(self._dir, "logs", f"{names[0] if len(names) == 1 else title}.log")
        pipesize = _PIPE_BYTES if max(len(names), len(self._plan.names) * (title == "head")) > 100 else -1
        with path.open("ab") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=env, pipesize=pipesize,
                start_new_session=True, preexec_fn=self._signals.unblock,
            )  # fmt: skip
        child = _Child(title, names, process, path)
        self._selector.register(process.stdout, selectors.EVENT_READ, child)  # type: ignore[arg-type]
        return child

    def wait_ready(self, timeout: float) -> int:
        """Wait until all nodes have registered, and show the wait on stderr.

        Returns:
            0, or the number of a signal that ended the wait.

        Raises:
            RlinfActorsError: the head or an agentd has failed.
            ClusterTimeoutError: the wait takes longer than *timeout* seconds.
        """
        began = time.monotonic()
        with WaitLine() as line:
            while self._missing:
                waited = time.monotonic() - began
                if waited >= timeout:
                    raise ClusterTimeoutError(
                        f"{self._up()} nodes are up after {timeout:g} s; {self._late()}; "
                        "see their logs, or wait longer by --timeout"
                    )
                if waited >= line.next_s:
                    line.show(self._facts(), waited)
                for key, _ in self._selector.select(min(line.next_s, timeout) - waited):
                    if isinstance(key.data, _Child):
                        self._hear(key.data)
                    elif (number := self._signals.next()[0]) in ENDING:
                        return number
        return 0

    def _hear(self, child: _Child) -> None:
        lines = child.heard()
        if lines is None:
            raise RlinfActorsError(_ended(child, starting=True))
        for text in lines:
            if child is self._head:
                self._address = joined_address(self._plan.reach, text.decode().rpartition(":")[2])
                self._give_orders()
                continue
            try:
                said = json.loads(_LABEL.sub(b"", text))
            except ValueError:  # what a login shell prints
                continue
            if isinstance(said, dict) and "error" in said:
                raise RlinfActorsError(f"{child.title}: {said['error']}")
            if isinstance(said, dict):
                self._missing.pop(str(said.get("node_id")), None)

    def _give_orders(self) -> None:
        for child in self._agents:
            child.tell(
                msgspec.json.encode(AgentOrder(self._address, {name: self._orders[name] for name in child.names}))
            )

    def _facts(self) -> Facts:
        return Facts(f"waiting for nodes: {self._up()}", self._late())

    def _up(self) -> str:
        gone = set(self._missing.values())
        return those_up([name for name in self._plan.names if name not in gone], len(self._plan.names))

    def _late(self) -> str:
        """Return which nodes are missing, and what their logs say last."""
        if not self._address and self._head is not None:
            return f"the head has not started{_last(self._head)}"
        gone = set(self._missing.values())
        late = [
            f"{name} by {child.title}{_last(child)}" for child in self._agents for name in child.names if name in gone
        ]
        return named("missing ", late, "; ")

    # --- the program ---

    def run(self) -> int:
        """Run the program, and forward signals to it. Return its exit code, 128 + N if signal N has ended it."""
        env = {name: value for name, value in os.environ.items() if name not in (HEAD_KEY, KEY_FILE)}
        env |= {HEAD: self._address, KEY_DIR: f"{self._dir}/keys", NUM_NODES: str(len(self._plan.names))}
        started = program.start(self._id, self._command, env, self._signals.unblock)
        pidfd = os.pidfd_open(started.pid)
        try:
            self._selector.register(pidfd, selectors.EVENT_READ, started)
            while started.poll() is None:
                for key, _ in self._selector.select():
                    if key.data is None:
                        number, typed = self._signals.next()
                        if not typed:  # the program is in the terminal's foreground group, as this process is
                            started.send_signal(number)
                    elif isinstance(key.data, _Child):
                        self._watch(key.data)
        finally:
            os.close(pidfd)
        code = started.returncode
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        self._failure = f"the program {how}" if code else ""
        return code if code >= 0 else 128 - code

    def _watch(self, child: _Child) -> None:
        if child.heard() is None:
            self._selector.unregister(child.process.stdout)  # type: ignore[arg-type]
            _say(_ended(child))

    # --- end ---

    def _end(self) -> None:
        """End the program's processes, the agentds and the head, and remove the directories of the run."""
        if not self._dir:
            return
        if left := program.end(self._id):
            _say(f"ended {counted(left, 'process')} that the program had left")
        late = set(self._missing.values())
        for child in self._agents:
            child.close()
            if not late.isdisjoint(child.names):  # it may not read its stdin yet, as an ssh that still connects
                child.process.terminate()
        self._signals.forget()  # what has ended the program
        self._await_ends(self._agents)
        killed = [child.title for child in self._agents if not child.end()]
        if self._head is not None:
            self._head.tell(b"ended")
            self._head.close()
            self._await_ends([self._head])
            if not self._head.end():
                killed.append(self._head.title)
        for title in killed:
            _say(f"{title} had not ended, and was killed")
        if killed:
            clear_stale(Settings.load())  # records of what was killed
        self._selector.close()
        self._keep_logs()
        for path in (self._dir, *self._node_dirs.values()):
            shutil.rmtree(path, ignore_errors=True)
        os.close(self._lock)

    def _await_ends(self, children: Sequence[_Child]) -> None:
        """Wait until *children* have ended, for END_S at most. The second Ctrl-C or SIGTERM ends the wait."""
        began = time.monotonic()
        with selectors.DefaultSelector() as selector, WaitLine() as line, contextlib.ExitStack() as stack:
            selector.register(self._signals, selectors.EVENT_READ)
            running = [child for child in children if child.process.poll() is None]
            for child in running:
                pidfd = os.pidfd_open(child.process.pid)
                stack.callback(os.close, pidfd)
                selector.register(pidfd, selectors.EVENT_READ, child)
            while running and self._impatient < 2 and (waited := time.monotonic() - began) < END_S:
                what = named("the end of ", [child.title for child in running])
                if waited >= line.next_s:
                    line.show(Facts(f"waiting for {what}"), waited)
                for key, _ in selector.select(min(line.next_s, END_S) - waited):
                    if isinstance(key.data, _Child):
                        selector.unregister(key.fileobj)
                        running.remove(key.data)
                    elif self._signals.next()[0] in ENDING:
                        self._impatient += 1
                        if self._impatient == 1:
                            _say(f"the program has ended; this waits for {what}: Ctrl-C once more kills them")

    def _keep_logs(self) -> None:
        parent = Settings.load().kept_logs
        if not self._failure or parent is None:
            return
        try:
            if kept := keep(self._dir, parent, self._failure):
                _say(f"the logs of this run are kept in {kept} because {self._failure}")
        except OSError as error:
            _say(f"the logs of this run are removed, for they cannot be kept in {parent}: {error}")


def _say(text: str) -> None:
    try:
        note(text)
    except OSError:  # the terminal is gone: the end of a run, and its exit code, must not depend on it
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 2)  # for what Python has kept to write at its end


def _last(child: _Child) -> str:
    lines = child.last_lines(1)
    return f", which said last: {lines[0]}" if lines else ""


def _ended(child: _Child, starting: bool = False) -> str:
    """Return how a process has ended whose stdout is closed, and the end of its log, for people.

    If it was *starting*, return also what to do, as far as that is known.
    """
    code, log = 0, child.last_lines()
    try:
        code = child.process.wait(1.0)  # its pipes close as it ends
        how = f"has ended with exit code {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"
    except subprocess.TimeoutExpired:
        how = "has closed its stdout"
    advice = plans.advice(child.title, code, log[-1]) if starting and log else ""
    if advice and "Traceback" in log[0]:
        log = log[-1:]
    text = "; ".join(filter(None, (f"{child.title} {how}", advice, "the last lines of its log:" if log else "")))
    return text + "".join(f"\n    {line}" for line in log)
