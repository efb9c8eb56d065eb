"""The worker process. The template's child runs `run_worker`, from the set-up of the process to its end.

Threads: the main thread belongs to code of the user. The I/O thread has the connections, the heartbeats and the socket
to the template. A robot worker has two more: its guard, and the thread of on_lease_lost.

Start: the worker listens, sends WorkerUp to the template, waits for the class that the owner of the group sends
(Create), constructs the class on the main thread, and runs calls.

End by SIGTERM (`OrderlyExit`): the process runs the `atexit` functions, flushes stdout and stderr, and ends by SIGTERM.
The signal handler runs on the main thread, between two instructions of Python, so C code that does not return keeps it
from running. Then the I/O thread, which learns of the signal by the wakeup descriptor, ends the process at once, unless
the user registered `atexit` functions: these wait for the main thread, and the sender of the signal bounds that wait by
SIGKILL. If an event loop of user code takes the wakeup descriptor (uvloop does), the process ends only when C code
returns. In a robot worker the guard makes the robot safe first. A SIGTERM handler of the user replaces this one.
Processes that user code forks end by SIGTERM at once.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import gc
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from rlinf_actors import environ_block, forks
from rlinf_actors.errors import UsageError, WorkerStartError
from rlinf_actors.group.class_facts import public_methods
from rlinf_actors.group.control import end_launched
from rlinf_actors.model.address import WorkerAddress
from rlinf_actors.model.hardware import AcceleratorType
from rlinf_actors.net import reading
from rlinf_actors.net.held_signals import not_held
from rlinf_actors.net.loop import IoThread
from rlinf_actors.settings import PTRACE
from rlinf_actors.wire import failure, frames, payload
from rlinf_actors.wire import template_protocol as packets
from rlinf_actors.wire.values import WorkerSpec
from rlinf_actors.wire.worker_questions import (
    AskWorker,
    RecordTrace,
    ShowFigures,
    ShowStacks,
    TraceRecorded,
    WorkerAnswer,
    WorkerAnswered,
)
from rlinf_actors.worker import context as worker_context
from rlinf_actors.worker import outside_stacks
from rlinf_actors.worker.children import Children
from rlinf_actors.worker.debugger import Debugger, Stop
from rlinf_actors.worker.device_lock import DeviceLock
from rlinf_actors.worker.executors import (
    STOPPED,
    Activity,
    BesideExecutor,
    Executor,
    LoopExecutor,
    SerialExecutor,
    ThreadsExecutor,
    uses_event_loop,
)
from rlinf_actors.worker.figures import worker_figures
from rlinf_actors.worker.lease_guard import Guard, Guarded
from rlinf_actors.worker.master_store import serve_on_one_address
from rlinf_actors.worker.opening import open_worker, switch_trace
from rlinf_actors.worker.resized import resized
from rlinf_actors.worker.stacks import worker_stacks
from rlinf_actors.worker.standstill import Unwound
from rlinf_actors.worker.stopper import give_class
from rlinf_actors.worker.template_socket import TemplateSocket
from rlinf_actors.worker.user_class import load_class
from rlinf_actors.worker.worker import Worker
from rlinf_actors.worker.worker_server import Creation

if TYPE_CHECKING:
    from pdb import Pdb

    from rlinf_actors.runtime.runtime import Runtime

LATER_IMPORTS = (
    "rlinf_actors.channel.channel",
    "rlinf_actors.hardware.extensions",
    "rlinf_actors.net.local_network",
    "rlinf_actors.placement.component",
    "rlinf_actors.security.keyfile",
    "rlinf_actors.worker.channelhost",
    "rlinf_actors.worker.worker_pdb",
)
"""Modules that a worker may import later. Its template imports them before it forks: an upgrade may have replaced their
files by then.
"""
CLOSE_S = 5.0
"""Seconds that groups which a worker has launched have for their own `_close`, and then from SIGTERM to SIGKILL."""
STUCK_S = 0.1
"""Seconds that the main thread has to run its signal handler before the I/O thread may end the process."""


class OrderlyExit:
    """Ends the process of a worker without robots at SIGTERM. Construct it on the main thread, then call `watch`."""

    def __init__(self) -> None:
        self._before = atexit._ncallbacks()
        self._begun = False
        self._loop = -1  # wakeup descriptor of an event loop on the main thread
        self._reader, self._writer = os.pipe()
        for fd in (self._reader, self._writer):
            os.set_blocking(fd, False)
        signal.signal(signal.SIGTERM, self._leave)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        forks.handled_in_parent([signal.SIGTERM], self._forked)

    def watch(self, io: IoThread) -> None:
        """Let the I/O thread end the process at SIGTERM if C code keeps the main thread from handling the signal."""
        io.call(io.loop.add_reader, self._reader, self._signalled, io)

    def take_wakeup_fd(self) -> None:
        """Replace the signal wakeup descriptor that the running event loop has installed. Called in the loop.

        uvloop installs a descriptor that is not read while the main thread is in C code. The I/O thread reads the
        descriptor that replaces it, and passes the signals on to uvloop's.
        """
        taken = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        if taken in (-1, self._writer):
            return
        if self._loop < 0:
            self._loop = os.dup(taken)  # the loop closes its own whenever it ends
        else:
            os.dup2(taken, self._loop, inheritable=False)

    @not_held
    def _leave(self, number: int, frame: FrameType | None) -> None:
        if self._begun:
            return  # sent again
        self._begun = True
        if reading.active is None:
            self._end()
        else:
            reading.active.after_handling(self._end)

    def _end(self) -> None:
        try:
            atexit._run_exitfuncs()
        except BaseException:  # noqa: BLE001 - no caller: stderr is part of the exit report
            traceback.print_exc()
        _end_by_sigterm()

    def _signalled(self, io: IoThread) -> None:
        try:
            numbers = os.read(self._reader, 4096)
        except BlockingIOError:
            return
        if self._loop >= 0:
            with contextlib.suppress(OSError):  # the loop has ended, or is far behind
                os.write(self._loop, numbers)
        if signal.SIGTERM in numbers and signal.getsignal(signal.SIGTERM) == self._leave:
            io.loop.call_later(STUCK_S, self._end_if_stuck)

    def _end_if_stuck(self) -> None:
        if not self._begun and atexit._ncallbacks() <= self._before:
            _end_by_sigterm()

    def _forked(self) -> None:
        """Restore the default handler of SIGTERM in a process that user code has forked.

        Called there after each fork.
        """
        if signal.getsignal(signal.SIGTERM) == self._leave:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)


def _end_by_sigterm() -> None:
    """Flush stdout and stderr, and end the process as SIGTERM does without a handler. Any thread."""
    _flush()
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal(signal.SIGTERM, None)  # SIG_DFL; signal.signal allows this on the main thread alone
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(143)  # this thread blocks the signal


def run_worker(spec: WorkerSpec, place: packets.WorkerPlace, control_fd: int, guarded: Guarded | None = None) -> None:
    """Run the worker that *spec* describes. Never returns: the process ends here.

    *place* is the worker's node and directories. *control_fd* is a SOCK_SEQPACKET socket to the template. When the
    template ends, this socket closes, and the worker ends too; a robot worker, whose watchdog gave it *guarded*, makes
    its robots safe first.
    """
    guard = Guard(spec, place, guarded, _instance) if guarded is not None else None
    ends = (lambda: _exit(143)) if guard is None else (lambda: None)
    control = TemplateSocket(socket.socket(fileno=control_fd), ends)
    leaving = OrderlyExit() if guard is None else None
    try:
        try:
            context = _start(spec, place, control, guard)
            if leaving is not None:
                leaving.watch(context.runtime.io)
        except (OSError, RuntimeError) as error:  # this machine has run out of something
            text = (error.strerror if isinstance(error, OSError) else "") or str(error)
            control.send(packets.StartFailed(spec.id, f"node {place.node} cannot start it: {text}"))
            raise
        _serve(context, leaving, guarded.stopper if guarded is not None else -1)
    except Unwound:  # the guard ends the process
        pass
    except BaseException:  # noqa: BLE001 - no caller: the tail of stderr is in the exit report
        traceback.print_exc()
    _end(guard)


def _closed(answer: Callable[[], None], guard: Guard | None, runtime: Runtime) -> None:
    """End the groups that this worker has launched, after its own `_close` and before the caller has the *answer*."""
    if guard is not None:
        guard.closed()
    if any(group.closes is not None for group in runtime.groups.all()):
        runtime.io.submit(end_launched(runtime, CLOSE_S)).add_done_callback(lambda _: answer())
    else:
        answer()


def _instance() -> Any:
    """Return the object of the user's class that the runtime has made; None before."""
    context = worker_context.current()
    return context.instance if context is not None else None


def _end(guard: Guard | None) -> NoReturn:
    """End this worker process, because it can run no more calls. Any thread.

    In a robot worker the guard first runs on_lease_lost, and then ends the process. In other workers the exit code is
    1.
    """
    if guard is not None:
        guard.stay()
    _exit(1)


def _start(
    spec: WorkerSpec, place: packets.WorkerPlace, control: TemplateSocket, guard: Guard | None
) -> worker_context.WorkerContext:
    """Start the runtime, bind the sockets, and send WorkerUp to the template. Runs before any user code."""
    context = open_worker(
        WorkerAddress(spec.group, spec.rank),
        spec,
        place,
        on_given_up=lambda reason: _given_up(reason, guard),
        on_closed=lambda answer: _closed(answer, guard, context.runtime),
    )
    server, name = context.server, context.address.get_name()

    async def take_children() -> Children:
        loop = asyncio.get_running_loop()
        children = Children(loop, spec, place, server.send, server.rejected.add)
        server.serve((frames.WhereIs,), children.asked)
        server.serve((frames.Resized,), resized)
        server.on_forgotten(children.table.forget)
        control.listen(loop)
        return children

    context.children = context.runtime.io.submit(take_children()).result()
    if guard is not None:
        context.guard, context.lease_page = guard, guard.page
    has_devices = worker_context.accelerator_type(context.environ) is not AcceleratorType.NO_ACCEL
    lock = DeviceLock(spec.id, name, has_devices, control.post, worker_context.make_logger(name))
    context.device_lock = lock
    worker_context.install(context)
    if spec.code:
        text = "worker %s runs code %s, the copy that its driver has sent to %s"
        worker_context.make_logger(name).info(text, name, spec.code[:12], spec.code_paths[0])
    control.serve(packets.DevicesLocked, lock.granted)
    control.serve(packets.DevicesBusy, lock.busy)
    control.serve(packets.NodeRegistered, lambda packet: _node_registered(context, packet))
    robots = [claim.title for claim in spec.claims]
    namespace, io, logger = context.runtime.namespace, context.runtime.io, worker_context.make_logger(name)
    debugger = Debugger(name, namespace, io, _pdb, logger, robots)
    if sys.breakpointhook is sys.__breakpointhook__:
        sys.breakpointhook = debugger.hook
    control.serve(AskWorker, lambda packet: _answer(packet, context, debugger, control))
    control.serve(packets.Ping, lambda _: control.try_send(_pong(spec.id, server.activity(), *debugger.where())))
    control.serve(packets.AllowTracer, lambda packet: _allow_tracer(control, packet))
    if context.environ.get(PTRACE) == "1":
        outside_stacks.allow_tracer(place.budgets[0])  # the template and all that it starts
    master_port = context.ports.hold() if spec.rank == 0 else 0
    stack_fd = outside_stacks.register()
    control.send(packets.WorkerUp(spec.id, context.endpoint, context.tcp_port, master_port, stack_fd))
    return context


def _node_registered(context: worker_context.WorkerContext, packet: packets.NodeRegistered) -> None:
    context.runtime.node_registered(packet.epoch, packet.again)
    assert context.children is not None
    context.children.tell_all(packet)


def _pong(id: str, doing: Activity, place: str, stop: int) -> packets.Pong:
    most = packets.TEXT_CHARS
    return packets.Pong(id, doing.method[:most], doing.since, doing.waiting, place[:most], stop)


def _pdb(stop: Stop) -> Pdb:
    from rlinf_actors.worker.worker_pdb import WorkerPdb

    return WorkerPdb(stop)


def _answer(
    packet: AskWorker, context: worker_context.WorkerContext, debugger: Debugger, control: TemplateSocket
) -> None:
    """Answer a question of agentd, at once or later. I/O thread."""
    id, question, server = context.spec.id, packet.question, context.server

    def send(answer: WorkerAnswer) -> None:
        control.post(WorkerAnswered(id, packet.request, answer))

    if isinstance(question, ShowStacks):
        send(worker_stacks(id, server.activity(), server.executor))
    elif isinstance(question, ShowFigures):
        send(worker_figures(id, server.activity(), context.messenger, question.at))
    elif isinstance(question, RecordTrace):
        send(TraceRecorded(id, switch_trace(question, context)))
    else:
        debugger.asked(question, send)


def _allow_tracer(control: TemplateSocket, packet: packets.AllowTracer) -> None:
    outside_stacks.allow_tracer(packet.pid)
    control.post(packets.TracerAllowed(packet.id, packet.pid))


def _serve(context: worker_context.WorkerContext, leaving: OrderlyExit | None, stopper: int) -> None:
    """Construct the user's class and run its calls on the main thread. Return only if the process must end.

    *stopper* is the descriptor of the connection to the stopper, -1 without one.
    """
    server = context.server
    creation = server.creations.get()
    server.constructing()
    try:
        executor, instance = _construct(context, creation, leaving, stopper)
        if context.spec.incarnation:
            executor.begin(instance.on_restart)
    except BaseException as error:  # the owner gets the error, and ends this process
        if context.spec.incarnation:
            raise  # one more failure of this rank: the head decides whether to restart it again
        kind = "start" if isinstance(error, WorkerStartError) else "raised"
        server.refuse(error)
        server.answer(creation.peer, *failure.encode(creation.frame.id, error, kind))
        server.creations.get()  # blocks for ever: the owner stops the group
        return
    if not isinstance(executor.main if isinstance(executor, BesideExecutor) else executor, ThreadsExecutor):
        context.runtime.serving_thread = threading.get_ident()
    server.open(executor)
    server.answer(creation.peer, frames.Runs(creation.frame.id, ""))
    server.constructed.set()
    executor.serve(instance)
    method = executor.activity().method
    raise UsageError(STOPPED.format(f"{method}()" if method else "no call"))


def _construct(
    context: worker_context.WorkerContext, creation: Creation, leaving: OrderlyExit | None, stopper: int
) -> tuple[Executor, Any]:
    """Import the user's class, construct it with the owner's arguments, and return its executor and the instance.

    Raises:
        WorkerStartError: the class or its arguments cannot be imported here; the text says what to do.
        BaseException: the error of the user's constructor.
    """
    try:
        environ_block.replace(creation.frame.env)
    except ValueError as error:
        raise WorkerStartError(f"its owner sends variables that this version cannot set: {error}") from None
    where = f"{sys.executable} on {context.place.node}"
    if context.spec.rank == 0:
        serve_on_one_address(creation.frame.env, worker_context.make_logger(context.address.get_name()))
    cls, args, kwargs, extras = load_class(creation.frame, creation.parts, where)
    context.take(extras)
    infos = context.runtime.hardware_infos
    imported = give_class(stopper, creation.frame, cls, infos) if stopper >= 0 else lambda: None
    assert context.children is not None
    context.children.hand_out(payload.encode(extras, "what came with the class"))
    gc.enable()
    threads = creation.frame.max_concurrency

    def failed() -> None:  # called in the handler of an internal error
        traceback.print_exc()
        _end(context.guard)

    executor: Executor = ThreadsExecutor(threads, failed) if threads > 1 else SerialExecutor()
    if uses_event_loop(cls, Worker):
        executor = LoopExecutor(threads, leaving.take_wakeup_fd) if leaving is not None else LoopExecutor(threads)
    beside = {name: method.concurrent for name, method in public_methods(cls).items() if method.concurrent}
    if beside:
        executor = BesideExecutor(executor, beside, failed)
    imported()
    context.constructing = cls
    return executor, executor.begin(lambda: cls(*args, **kwargs))


def _given_up(reason: str, guard: Guard | None) -> None:
    """End this process after the head has declared the worker dead and may have replaced it. I/O thread.

    In a robot worker, *guard* runs on_lease_lost first, and then ends the process.
    """
    if guard is not None:
        guard.lose(reason)
        return
    print(f"this worker ends: {reason}", file=sys.stderr, flush=True)  # noqa: T201
    _exit(1)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, RuntimeError):  # the reader is gone, or another thread writes
            if stream is not None:
                stream.flush()


def _exit(code: int) -> NoReturn:
    _flush()
    os._exit(code)
