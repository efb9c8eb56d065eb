"""The template: a process that has imported the modules that workers need, and forks a worker for each request.

Theory of operation
-------------------
agentd has its keeper start one template for each interpreter and set of load-time variables. `bootstrap` checks the
interpreter. `main` imports the modules on one thread, and sends TemplateReady to agentd. From then on the template is
one select loop over non-blocking sockets, in the one thread of its process:

* `AgentLink` is the socket to agentd. It passes agentd's packets to `Template._obey` and queues packets to agentd.
* `ForkedWorkers` manages the workers: their control sockets, output (`LogPump`), leases and ends.
* SIGCHLD and SIGTERM only wake the loop, by a socket pair.

A Fork packet makes a worker: a cgroup, two pipes, a control socket, and then os.fork. The child leaves the loop through
`Template.run`, so that no frame of the template stays on its stack, and becomes the worker in `child_setup`. If the
template may not fork (it has threads, or an initialized accelerator), or the launch asks for "spawn", it starts a new
interpreter, which gets the Fork packet in an inherited file (TemplateConfig.packet) and skips the loop.

A worker ends in this order: it becomes a zombie; the template kills the processes that the worker left behind (the
template is a subreaper, so orphans become its children); it copies the last output; it sends Exited; it reaps the
worker once agentd has a pidfd of the worker (Watching), so that agentd cannot mistake another process for the worker.

When agentd ends, the template ends too. If workers are kept, the template instead waits for another agentd (Adopt) for
a limited time, while workers without robots continue. The end of the owner (a pidfd) ends the template and every
worker. At its own end the template revokes the leases of robot workers, gives them ROBOT_GONE_S seconds, and kills
every process below it.

A robot worker has a watchdog (template.watchdog) between itself and the template: the process that the template forks
becomes the watchdog, and forks the worker. When the watchdog has ended, the worker has, and its zombie is the
template's child.

House rules:
* One thread, one select loop; no event loop, no ZeroMQ context, no CUDA: nothing that a fork breaks.
* Nothing blocks: pipes and sockets are non-blocking, and packets that cannot be sent wait in a queue.
* The template signals a pid only while the kernel cannot reuse it: of an unreaped process, or a child of this
  subreaper.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from types import ModuleType

import msgspec
from msgspec.structs import replace

from rlinf_actors import procfs
from rlinf_actors.cgroups.roots import Roots
from rlinf_actors.cgroups.worker_cgroup import Cgroup, cgroup_of
from rlinf_actors.codesync.locks import hold_own
from rlinf_actors.dropin import install_if_asked
from rlinf_actors.exhaustion import explain
from rlinf_actors.installed import fingerprint
from rlinf_actors.model.accelerator_table import ACCELERATOR_TABLE
from rlinf_actors.net import budget_memory, fault_injection
from rlinf_actors.net.daemon import ends_process
from rlinf_actors.settings import Settings
from rlinf_actors.template import child_setup
from rlinf_actors.template.agent_link import AgentLink
from rlinf_actors.template.bootstrap import fail
from rlinf_actors.template.forked_workers import ForkedWorker, ForkedWorkers
from rlinf_actors.template.outside_stacks import OutsideStacks
from rlinf_actors.template.wrapped_start import WrappedStart, connect
from rlinf_actors.wire import template_protocol as packets
from rlinf_actors.wire.protocol import make_decoders
from rlinf_actors.wire.stack_values import IO_THREAD
from rlinf_actors.wire.values import ExitReport
from rlinf_actors.wire.worker_questions import AskWorker, ShowStacks

END_S = 5.0
"""Most seconds to wait for the ends of killed processes. A process in an uninterruptible system call may never end."""


def end_all(workers: Sequence[ForkedWorker], wakeup: socket.socket) -> None:
    """Kill every process below the ending template, and wait at most END_S seconds until they have ended.

    The watchdogs of robot workers, whose leases were revoked before, first have ROBOT_GONE_S seconds to end.

    Args:
        workers: the workers that are not reaped yet.
        wakeup: a non-blocking socket that becomes readable when a child process has ended.
    """
    with selectors.DefaultSelector() as selector:
        selector.register(wakeup, selectors.EVENT_READ)
        _wait_for_robots(workers, selector, wakeup)
        deadline = time.monotonic() + END_S
        for worker in workers:
            procfs.kill_group(worker.pid)
            worker.cgroup.kill()
        while True:
            for pid in procfs.subtree(os.getpid())[1:]:
                procfs.kill(pid)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                break
            if not selector.select(max(0.0, deadline - time.monotonic())):
                break
            with contextlib.suppress(BlockingIOError):
                wakeup.recv(4096)
    for worker in workers:
        if not worker.told:  # else its pipes are read to their ends, and closed
            worker.out.finish()
            worker.err.finish()
        worker.cgroup.remove()


def _wait_for_robots(workers: Sequence[ForkedWorker], selector: selectors.BaseSelector, wakeup: socket.socket) -> None:
    robots = {worker.id: worker for worker in workers if worker.has_robots and not worker.told}
    for worker in workers:
        if worker.id not in robots:
            procfs.kill_group(worker.pid)
    deadline = time.monotonic() + packets.ROBOT_GONE_S
    while True:
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        robots = {id: one for id, one in robots.items() if os.waitid(os.P_PID, one.pid, flags) is None}
        if not robots or not selector.select(max(0.0, deadline - time.monotonic())):
            return
        with contextlib.suppress(BlockingIOError):
            wakeup.recv(4096)


OPTIONAL_IMPORTS = ("uvloop",)


class TemplateConfig(msgspec.Struct, frozen=True, omit_defaults=True):
    """The configuration of a template process: the last argument of its command line, as JSON."""

    agent: int = 0  # with packet: pid of the template
    owner: int = -1  # inherited pidfd of the process with whose end the template ends, -1 without one
    entry: str = "rlinf_actors.worker.main:run_worker"  # runs a worker
    preload: Sequence[str] = ()  # modules to import in addition to those that every worker needs
    keep: str = ""  # path of the unix socket at which a later agentd adopts the workers; "": they end with agentd
    keep_s: float = 0.0  # seconds that a later agentd has to adopt them
    slot: int = 0  # bytes that the environment reserves for the worker mark
    start: str = ""  # in a worker under a profiler: path of the template's socket (template.wrapped_start)
    packet: int = -1  # descriptor of a file with one Fork packet: become that worker instead of a template
    link: int = -1  # with packet: descriptor of the socket of the worker's watchdog; -1 without robots
    cgroups: Roots = Roots()  # parents of the workers' cgroups
    cgroup: Cgroup = Cgroup()  # with packet: the cgroup of that worker
    budgets: tuple[int, int, int] = (-1, 0, 0)  # inherited descriptor, device and inode of net.budget_memory; -1: none
    log_bytes: int = 0  # size at which a worker's log file is rotated, 0 for never


def main(fd: int, node: str, config_json: str) -> None:
    """Run a template until the template ends. In a process that the template forks or spawns as a worker, run that
    worker.

    Args:
        fd: a SOCK_SEQPACKET socket to agentd; in a spawned worker, to the template.
        node: name of the node, for errors.
        config_json: a TemplateConfig as JSON.
    """
    procfs.open_standard_descriptors()
    config = msgspec.json.decode(config_json, type=TemplateConfig)
    fault_injection.load(Settings.load().faults)
    if gone := hold_own(os.environ, sys.prefix):
        text = f"interpreter {sys.executable} on node {node} cannot run: {gone}"
        if config.packet >= 0 or config.start:
            sys.exit(text)  # stderr is part of the worker's exit report
        fail(fd, text)
    if config.packet >= 0 or config.start:
        fd, packet = connect(config.start) if config.start else (fd, config.packet)
        for inherited in (fd, config.link):
            if inherited >= 0:
                os.set_inheritable(inherited, False)
        with open(packet, "rb") as file:
            fork = msgspec.msgpack.decode(file.read(), type=packets.Fork)
        child_setup.run(child_setup.ChildStart(fork, fd, config.entry, config.agent, config.cgroup, link=config.link))
        return
    with ends_process():
        start = Template(fd, node, config).run()
    if start is None:
        atexit._run_exitfuncs()  # of preloaded modules
        os._exit(0)  # nothing is left to end; the interpreter would take apart all that it has imported
    child_setup.run(start)


class Template:
    """The select loop of a template process. It carries out what agentd's packets ask for, and starts workers.

    Args:
        fd: number of the socket to agentd.
        node: name of the node, for errors.
        config: the configuration of the template.
    """

    def __init__(self, fd: int, node: str, config: TemplateConfig) -> None:
        self._config = config = replace(config, budgets=budget_memory.inherited(*config.budgets))
        self._node = node
        self._slot = (procfs.mark_slot(), config.slot)
        self._agent = socket.socket(fileno=fd)
        for inherited in (fd, config.owner):
            if inherited >= 0:
                os.set_inheritable(inherited, False)
        self._paths = list(sys.path)
        self._installed = fingerprint(self._paths, config.preload)  # before any of it is imported
        self._selector = selectors.DefaultSelector()
        self._over = False
        self._why = ""
        self._child: child_setup.ChildStart | None = None
        keep, keep_s, keeper = config.keep, config.keep_s, os.getppid()
        self._link = AgentLink(self._selector, self._agent, keep, keep_s, self._obey, self._orphaned, keeper)
        self._workers = ForkedWorkers(self._selector, self._on_packet, bool(config.keep))
        self._stacks = OutsideStacks(self._selector, self._link.send, self._workers.tell)
        self._nofile, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # five fds a worker
        self._wakeup = socket.socketpair()

    def run(self) -> child_setup.ChildStart | None:
        """Run the template's loop until the template ends, and return None.

        In a forked worker, return what the worker needs to start, so that no frame of the template stays on its stack.
        """
        procfs.set_name("rlinf-template")
        procfs.set_title(" ".join(["rlinf: template", *self._config.preload]))
        procfs.set_subreaper()
        self._import()
        self._threads = child_setup.LibraryThreads()
        self._listen()
        gc.freeze()  # the collector never touches, and so never copies, pages of present objects; imports leave 0.2 MB
        why = cannot_fork()
        procfs.die_with_parent(0)  # until here the keeper's end killed it; from here on agentd's end is an EOF
        self._link.send(
            packets.TemplateReady(os.getpid(), sys.version.split()[0], not why, why, self._installed, self._paths)
        )
        while not self._over:
            patience = self._workers.patience(), self._link.patience(), self._stacks.patience()
            waits = [wait for wait in patience if wait is not None]
            for key, mask in self._selector.select(min(waits, default=None)):
                key.data(mask)
                if self._child is not None:
                    return self._child
            self._workers.check_ends()
            self._stacks.check()
            if self._link.patience() == 0.0:
                self._end(f"no agentd came back to it within {self._link.keep_s:g} s")
        self._link.refuse()
        self._workers.revoke_all(self._why)
        end_all(self._workers.workers, self._wakeup[0])
        self._link.remove()
        return None

    # --- start-up ---

    def _import(self) -> None:
        entry = self._import_needed(self._config.entry.partition(":")[0])
        for name in getattr(entry, "LATER_IMPORTS", ()):
            self._import_needed(name)
        for name in OPTIONAL_IMPORTS:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        install_if_asked()  # a preloaded module may import rlinf.scheduler
        for name in self._config.preload:
            try:
                importlib.import_module(name)
            except Exception:  # noqa: BLE001 - a worker that needs the module gets, and reports, the same error
                traceback.print_exc()
        make_decoders()  # here, so that no worker makes its own

    def _import_needed(self, name: str) -> ModuleType:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            package = "pyzmq" if error.name == "zmq" else error.name
            fail(
                self._agent.fileno(),
                f"interpreter {sys.executable} on node {self._node} has no {error.name}: "
                f"run '{sys.executable} -m pip install {package}'",
            )
            raise

    def _listen(self) -> None:
        ours, signals = self._wakeup
        for end in self._wakeup:
            end.setblocking(False)
        signal.set_wakeup_fd(signals.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only to wake the loop; the default discards the signal
        signal.signal(signal.SIGTERM, lambda *_: self._end("its template was stopped"))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        self._selector.register(ours, selectors.EVENT_READ, self._on_wakeup)
        self._link.start()
        if self._config.owner >= 0:
            self._selector.register(self._config.owner, selectors.EVENT_READ, lambda _: self._end("the driver ended"))

    # --- events ---

    def _end(self, why: str) -> None:
        self._over, self._why = True, self._why or why

    def _on_wakeup(self, _: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wakeup[0].recv(4096):
                self._workers.wake()

    def _obey(self, packet: packets.ToTemplate) -> bool:
        if isinstance(packet, packets.Fork):
            budgets = (os.getpid(), *self._config.budgets)
            self._start(replace(packet, place=replace(packet.place, budgets=budgets)))
        elif isinstance(packet, packets.Watching):
            self._workers.watched(packet.id)
        elif isinstance(packet, packets.Read):
            self._workers.read(packet)
        elif isinstance(packet, packets.Renew):
            self._workers.renew(packet)
        elif isinstance(packet, packets.Probe):
            self._workers.probe()
        elif isinstance(packet, packets.NodeRegistered):
            self._workers.tell_all(packet)
        elif isinstance(packet, packets.Shutdown):
            self._end("its agentd was stopped")
        elif isinstance(packet, packets.Adopt):
            self._adopted()
        elif isinstance(packet, packets.KeepFor):
            self._link.registered(packet.seconds)
        elif isinstance(packet, packets.Settled):
            self._workers.settled(packet.ids)
        elif (
            isinstance(packet, AskWorker)
            and isinstance(packet.question, ShowStacks)
            and packet.question.level != IO_THREAD
        ):
            worker = next((worker for worker in self._workers.workers if worker.id == packet.id), None)
            self._stacks.take(worker, packet, packet.question.level)
        else:
            self._workers.tell(packet)
        return not self._over and self._child is None

    def _on_packet(self, packet: packets.ToAgent) -> None:
        """Handle a packet of a worker, or about one: agentd gets it, or this template has asked for it."""
        if isinstance(packet, packets.TracerAllowed):
            self._stacks.allowed(packet)
        else:
            self._link.send(packet)

    def _orphaned(self) -> None:
        if self._config.keep:
            self._workers.orphaned("its agentd ended")
        else:
            self._end("its agentd ended")

    def _adopted(self) -> None:
        self._link.adopted()
        for kept in self._workers.inventory():
            self._link.send(kept)
        self._link.send(packets.Inventory(self._link.since, self._installed, self._paths))

    # --- starting a worker ---

    def _start(self, fork: packets.Fork) -> None:
        spec = fork.spec
        why = "" if spec.start_method == "spawn" else cannot_fork()
        roots, keeper = self._config.cgroups, procfs.stat(os.getpid())
        assert keeper is not None
        try:
            limits = roots.limits(spec.memory_limit, spec.pids_limit)
            worker = ForkedWorker(fork, cgroup_of(roots, keeper, spec.id), limits, self._config.log_bytes)
        except OSError as error:
            self._refuse(fork, f"node {self._node} cannot start it: {explain(error)}")
            return
        if unlimited := roots.missing(spec.memory_limit, spec.pids_limit):
            worker.note(f"{spec.group}:{spec.rank} runs without a limit that was asked for: {unlimited}")
        if why and not fork.wrapper:
            worker.note(f"{spec.group}:{spec.rank} is started afresh instead of forked: {why}")
        try:
            pid = self._spawn(worker) if why or fork.wrapper or spec.start_method == "spawn" else self._fork(worker)
        except OSError as error:
            if worker.start is not None:
                worker.start.close()
            worker.close()
            worker.cgroup.remove()
            what = fork.wrapper[0] if fork.wrapper else "another process"
            self._refuse(fork, f"node {self._node} cannot start {what}: {explain(error)}")
            return
        if pid:
            worker.started(pid)
            self._workers.add(worker)
            if not worker.has_robots:  # else its watchdog says it
                self._link.send(packets.Forked(spec.id, pid))

    def _refuse(self, fork: packets.Fork, reason: str) -> None:
        exit = ExitReport("start_failed", reason=reason)
        self._workers.told(packets.SurvivingWorker(fork.spec.id, exit=exit, token=fork.spec.token))

    def _fork(self, worker: ForkedWorker) -> int:
        """Fork a worker process. Return its pid in the template, and 0 in the worker, in which `run` then returns to
        `main`.
        """
        template = os.getpid()
        if fault_injection.active is not None:
            fault_injection.active.start("spawn.fork", f"{worker.fork.spec.group}:{worker.fork.spec.rank}")
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # no handler runs in the child
        try:
            pid = os.fork()
        except OSError:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            raise
        if pid:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            return pid
        os.dup2(worker.out.writer, 1)
        os.dup2(worker.err.writer, 2)
        control, link = worker.child.detach(), worker.theirs.detach() if worker.theirs is not None else -1
        worker.close()
        self._close()
        entry = self._config.entry
        self._child = child_setup.ChildStart(
            worker.fork, control, entry, template, worker.cgroup, True, self._slot, self._nofile, self._threads, link
        )
        return 0

    def _close(self) -> None:
        """Close the template's descriptors that this process, a worker that was just forked, has inherited."""
        self._selector.close()
        self._workers.close()
        self._stacks.close()
        self._link.close()
        for end in self._wakeup:
            end.close()
        for inherited in (self._config.owner, self._config.budgets[0]):
            if inherited >= 0:
                os.close(inherited)

    def _spawn(self, worker: ForkedWorker) -> int:
        """Start a new interpreter as the worker's process, and return its pid.

        The new process reads its Fork packet from a file that it inherits.
        """
        if fault_injection.active is not None:
            fault_injection.active.start("spawn.exec", f"{worker.fork.spec.group}:{worker.fork.spec.rank}")
        with open(os.memfd_create("fork"), "w+b") as packet:
            packet.write(packets.encode(worker.fork))
            packet.seek(0)
            control, fds = str(worker.child.fileno()), [worker.child.fileno(), packet.fileno()]
            link = worker.theirs.fileno() if worker.theirs is not None else -1
            fds += [link] * (link >= 0)
            config = TemplateConfig(
                os.getpid(), entry=self._config.entry, packet=packet.fileno(), link=link, cgroup=worker.cgroup
            )
            if wrapper := worker.fork.wrapper:
                worker.start = WrappedStart(self._selector, worker, self._started_under_profiler)
                config, fds = TemplateConfig(entry=config.entry, start=worker.start.path, cgroup=worker.cgroup), []
            argv = [*sys.orig_argv[: sys.orig_argv.index("-c") + 2], sys.argv[1], control, self._node]
            try:
                process = subprocess.Popen(
                    [*wrapper, sys.executable, *argv[1:], msgspec.json.encode(config).decode()],
                    stdin=subprocess.DEVNULL,
                    stdout=worker.out.writer,
                    stderr=worker.err.writer,
                    env=worker.fork.env,
                    pass_fds=fds,
                    start_new_session=True,
                    preexec_fn=worker.cgroup.enter if wrapper else None,  # a worker enters it by itself
                )
            except subprocess.SubprocessError as error:
                raise OSError(f"it cannot enter the cgroup {worker.cgroup}: {error}") from None
        process.returncode = 0  # ForkedWorkers reaps it
        return process.pid

    def _started_under_profiler(self, worker: ForkedWorker) -> None:
        self._link.send(packets.Forked(worker.id, worker.inner))


def cannot_fork() -> str:
    """Return why this process must not fork: it has other threads or an initialized accelerator. Return "" if it may
    fork.
    """
    threads = procfs.threads()
    if len(threads) > 1:
        return f"the template runs {len(threads)} threads ({', '.join(sorted(threads))})"
    torch = sys.modules.get("torch")
    for kind in {facts.torch_device_type for facts in ACCELERATOR_TABLE.values()} - {"cpu"}:
        is_initialized: Callable[[], bool] | None = getattr(getattr(torch, kind, None), "is_initialized", None)
        if is_initialized is not None and is_initialized():
            return f"torch.{kind} is initialized in the template"
    return ""
