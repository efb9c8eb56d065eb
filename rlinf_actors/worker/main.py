"""A worker process, from the fork to its end: `run_worker` is where the template's child goes.

Two threads: the I/O thread (connections, heartbeats, the socket to the template) and the main
thread, which belongs to the user's code. A robot worker has two more: its guard, and one for
on_lease_lost.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import importlib
import os
import socket
import sys
import threading
import traceback
from collections.abc import Awaitable
from typing import Any, NoReturn

from rlinf_actors import envblock
from rlinf_actors.cluster.attach import WorkerJob, set_worker_job
from rlinf_actors.errors import ConfigError, ProtocolMismatchError, UsageError, WorkerStartError
from rlinf_actors.group.names import check_lease_hook, public_methods
from rlinf_actors.model.address import WorkerAddress
from rlinf_actors.model.hardware import AcceleratorType
from rlinf_actors.net.ports import HeldPorts
from rlinf_actors.settings import EXT_MODULE
from rlinf_actors.tensors.broadcast import Broadcaster
from rlinf_actors.wire import failure, frames, payload, spawn
from rlinf_actors.wire.values import WorkerSpec
from rlinf_actors.worker import context as worker_context
from rlinf_actors.worker.children import Children
from rlinf_actors.worker.control import Control
from rlinf_actors.worker.device_lock import DeviceLock
from rlinf_actors.worker.executor import (
    STOPPED,
    Activity,
    BesideExecutor,
    Executor,
    LoopExecutor,
    SerialExecutor,
    ThreadsExecutor,
    uses_event_loop,
)
from rlinf_actors.worker.leaving import Leaving
from rlinf_actors.worker.membership import Member, listen, new_runtime
from rlinf_actors.worker.parking import Unwound
from rlinf_actors.worker.safety import Guard
from rlinf_actors.worker.server import Creation, WorkerServer
from rlinf_actors.worker.worker import Worker


def run_worker(spec: WorkerSpec, place: spawn.WorkerPlace, control_fd: int) -> None:
    """Be the worker that *spec* describes. Never returns: the process ends here.

    Args:
        spec: which worker of which group.
        place: where it runs.
        control_fd: a SOCK_SEQPACKET socket to the template; its end of file is our end.
    """
    control = Control(socket.socket(fileno=control_fd), lambda: _exit(143))
    guard = Guard(spec, place, control, lambda: Worker.current_worker) if spec.claims else None
    leaving = Leaving() if guard is None else None
    try:
        try:
            context, server = _start(spec, place, control, guard)
            if leaving is not None:
                leaving.watch(context.runtime.io)
        except (OSError, RuntimeError) as error:  # something of this machine has run out
            text = (error.strerror if isinstance(error, OSError) else "") or str(error)
            control.send(spawn.StartFailed(spec.id, f"node {place.node} cannot start it: {text}"))
            raise
        _serve(context, server, leaving)
    except Unwound:  # its guard ends the process
        pass
    except BaseException:  # noqa: BLE001 - nobody is above us; stderr's tail is in the exit report
        traceback.print_exc()
    _end(guard)


def _end(guard: Guard | None) -> NoReturn:
    """End the process, on whatever thread; a robot worker's guard does that, after on_lease_lost."""
    if guard is not None:
        guard.stay()
    _exit(1)


def _failed(guard: Guard | None) -> NoReturn:
    """A thread that serves calls has ended by an internal error, which is being handled. That thread."""
    traceback.print_exc()
    _end(guard)


def _start(
    spec: WorkerSpec, place: spawn.WorkerPlace, control: Control, guard: Guard | None
) -> tuple[worker_context.WorkerContext, WorkerServer]:
    """Bring the runtime up and say so; nothing of the user's has run yet."""
    runtime, security = new_runtime(spec, place, lambda reason: _given_up(reason, guard))
    address = WorkerAddress(spec.group, spec.rank)
    name = address.get_name()
    job = WorkerJob(runtime, place.head, lambda: context.extras, spec.node_rank, name)
    on_closed = guard.closed if guard is not None else lambda: None
    listening = listen(name, spec, place, runtime, security, job, control.try_send, on_closed)
    member, children = runtime.io.submit(_listen(spec, place, control, guard, listening)).result()
    server, endpoint, messenger = member.server, member.endpoint, member.messenger
    ports = HeldPorts()
    master_port = ports.hold() if spec.rank == 0 else 0
    has_devices = worker_context.accelerator_type(os.environ) is not AcceleratorType.NO_ACCEL
    device_lock = DeviceLock(spec.id, name, has_devices, control.post, worker_context.make_logger(name))
    context = worker_context.WorkerContext(
        address=address,
        spec=spec,
        place=place,
        runtime=runtime,
        environ=dict(os.environ),
        ports=ports,
        messenger=messenger,
        broadcaster=Broadcaster(messenger, address),
        server=server,
        device_lock=device_lock,
        guard=guard,
        children=children,
        lease_page=guard.page if guard is not None else None,
    )
    worker_context.install(context)
    set_worker_job(job)
    context.tcp_port = int(endpoint.tcp.rpartition(":")[2]) if endpoint.tcp else 0
    control.serve(spawn.DevicesLocked, device_lock.granted)
    control.serve(spawn.DevicesBusy, device_lock.busy)
    control.serve(spawn.Ping, lambda _: control.try_send(_pong(spec.id, server.activity())))
    control.send(spawn.Up(spec.id, endpoint, context.tcp_port, master_port))
    return context, server


async def _listen(
    spec: WorkerSpec, place: spawn.WorkerPlace, control: Control, guard: Guard | None, listening: Awaitable[Member]
) -> tuple[Member, Children]:
    """Be there for others, for children, and hear the template. On the I/O loop."""
    member = await listening
    loop, server = asyncio.get_running_loop(), member.server
    children = Children(loop, spec, place, server.send, member.strangers.refused)
    server.serve((frames.WhereIs,), children.asked)
    server.on_forgotten(children.table.forget)
    control.listen(loop, guarded=guard is not None)
    return member, children


def _pong(id: str, doing: Activity) -> spawn.Pong:
    return spawn.Pong(id, doing.method[: spawn.TEXT_CHARS], doing.since, doing.waiting)


def _serve(context: worker_context.WorkerContext, server: WorkerServer, leaving: Leaving | None) -> None:
    """Construct the class and run its calls. Main thread, to the end of the process."""
    creation = server.creations.get()
    server.constructing()
    try:
        executor, instance = _construct(context, creation, leaving)
        if context.spec.incarnation:
            executor.begin(instance.on_restart)
    except BaseException as error:  # the owner is told, and ends us
        if context.spec.incarnation:
            raise  # one more failure of this rank: whether there is another restart is the head's to say
        kind = "start" if isinstance(error, WorkerStartError) else "raised"
        server.refuse(error)
        server.answer(creation.peer, *failure.encode(creation.frame.id, error, kind))
        server.creations.get()  # for ever: the owner stops the group, its end ends us
        return
    if not isinstance(executor.main if isinstance(executor, BesideExecutor) else executor, ThreadsExecutor):
        context.runtime.serving_thread = threading.get_ident()
    server.open(executor)
    server.answer(creation.peer, frames.Ok(creation.frame.id))
    executor.serve(instance)
    method = executor.activity().method
    raise UsageError(STOPPED.format(f"{method}()" if method else "no call"))


def _construct(
    context: worker_context.WorkerContext, creation: Creation, leaving: Leaving | None
) -> tuple[Executor, Any]:
    """Import the class and call it with the owner's arguments.

    Raises:
        WorkerStartError: the class or its arguments cannot be imported here; says what to do.
        BaseException: whatever the user's constructor raises.
    """
    try:
        envblock.replace(creation.frame.env)
    except ValueError as error:
        raise WorkerStartError(f"its owner sends variables that this version cannot set: {error}") from None
    where = f"{sys.executable} on {context.place.node}"
    extension = os.environ.get(EXT_MODULE)
    if extension or creation.frame.extensions:
        from rlinf_actors.hardware import extensions

        try:
            if extension:
                extensions.load_module(extension)
            extensions.load_told(creation.frame.extensions, where)
        except ConfigError as error:
            raise WorkerStartError(str(error)) from error
    cls = _import_class(creation.frame.cls, where) if creation.frame.cls else None
    try:
        given, args, kwargs, extras = payload.decode(creation.parts)
    except ProtocolMismatchError as error:
        raise WorkerStartError(str(error)) from None
    except (ImportError, AttributeError) as error:
        raise WorkerStartError(
            f"the worker class or its arguments need something that {where} does not have: {error}. "
            f"Install it there, or name an interpreter that has it (env_configs: python_interpreter_path)"
        ) from error
    cls = cls or given
    if not (isinstance(cls, type) and issubclass(cls, Worker)):
        raise WorkerStartError(f"{cls!r} is not a subclass of rlinf_actors.Worker")
    context.extras.update(extras)
    assert context.children is not None
    context.children.hand_out(payload.encode(extras, "what came with the class"))
    try:
        check_lease_hook(cls)
    except UsageError as error:
        raise WorkerStartError(str(error)) from None
    gc.enable()
    threads = creation.frame.max_concurrency
    failed = functools.partial(_failed, context.guard)
    executor: Executor = ThreadsExecutor(threads, failed) if threads > 1 else SerialExecutor()
    if uses_event_loop(cls, Worker):
        executor = LoopExecutor(threads, leaving.hear) if leaving is not None else LoopExecutor(threads)
    beside = {name: method.concurrent for name, method in public_methods(cls).items() if method.concurrent}
    if beside:
        executor = BesideExecutor(executor, beside, failed)
    return executor, executor.begin(lambda: cls(*args, **kwargs))


def _import_class(reference: str, where: str) -> Any:
    module, _, qualname = reference.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for name in qualname.split("."):
            found = getattr(found, name)
    except ImportError as error:
        raise WorkerStartError(
            f"{reference} cannot be imported by {where}: {error}. Its sys.path is {sys.path}. Put the module on "
            f"PYTHONPATH there (env_configs: env_vars), install it, or define the class in the launching script, "
            f"which sends it along"
        ) from error
    except AttributeError as error:
        raise WorkerStartError(
            f"{reference} cannot be imported by {where}: {error}. Another version of {module} is installed there: "
            f"{getattr(sys.modules.get(module), '__file__', 'unknown file')}"
        ) from error
    return found


def _given_up(reason: str, guard: Guard | None) -> None:
    """Another may run under this rank by now: end, whoever else should have seen to it and did not. I/O thread."""
    if guard is not None:
        guard.lose(reason)
        return
    print(f"this worker ends: {reason}", file=sys.stderr, flush=True)  # noqa: T201
    _exit(1)


def _exit(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            continue  # the reader is gone
    os._exit(code)
