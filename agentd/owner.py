"""The owner of an agentd, if it has one: a driver, or an `rlinf-actors run`. agentd ends when its owner ends.

A run starts this agentd here, by ssh or by srun. It writes to stdin what to be, and keeps that pipe open until it ends.
So does a driver, which is watched by a pidfd too: the pipe closes when its process runs another program (os.exec), and
a child that it forked may keep the pipe open.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from rlinf_actors import procfs, run_dirs
from rlinf_actors.errors import ConfigError, RlinfActorsError
from rlinf_actors.model.run_order import AgentOrder
from rlinf_actors.net.host import pid_start
from rlinf_actors.settings import SLURM_NODE, Settings

SOURCE = "--of-run"


def take_order(stdin: int, environ: Mapping[str, str]) -> dict[str, Any]:
    """Read the order of a run from the descriptor *stdin*. Return the options of agentd that it stands for. Blocks.

    Raises:
        ConfigError: stdin has no order, or none for this node.
    """
    try:
        order = msgspec.json.decode(_line(stdin), type=AgentOrder)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"is for `rlinf-actors run`, and stdin has none of its orders: {error}", path=SOURCE
        ) from None
    name = next(iter(order.nodes)) if len(order.nodes) == 1 else environ.get(SLURM_NODE, "")
    if name not in order.nodes:
        names = ", ".join(order.nodes)
        raise ConfigError(f"{SLURM_NODE} is {name!r}, which is no node of this run: {names}", path=SOURCE)
    node = order.nodes[name]
    key = os.memfd_create("rlinf-key")
    os.write(key, node.key.encode())
    run_dir = node.run_dir or run_dirs.make("node-", Settings.load(environ))
    return {
        "connect": order.connect,
        "name": name,
        "rank": node.rank,
        "key_fd": key,
        "run_dir": run_dir,
        "log_dir": node.log_dir or f"{run_dir}/logs",
        "keep": False,
        "of_run": True,
        "ready_fd": os.dup(1),
    }


def watch_stdin(ended: Callable[[], None], stack: contextlib.AsyncExitStack) -> None:
    """Call *ended* once, on the running loop, when the pipe at stdin closes. The watch stops when *stack* closes."""
    loop = asyncio.get_running_loop()

    def readable() -> None:
        if not os.read(0, 1024):  # nothing is sent after the order
            loop.remove_reader(0)
            ended()

    with contextlib.suppress(PermissionError):  # of epoll: stdin is /dev/null
        loop.add_reader(0, readable)
        stack.callback(loop.remove_reader, 0)


def watch_owner(pid: int, started: int, ended: Callable[[], None], stack: contextlib.AsyncExitStack) -> None:
    """Call *ended* once, on the running loop, when the driver that owns agentd ends. The watch stops when *stack*
    closes.

    *pid* is the driver's process. *started* is its start in clock ticks since boot, or 0 if unknown; the start tells
    the driver from a later process with the same pid.

    Raises:
        RlinfActorsError: the driver has ended already.
    """
    loop = asyncio.get_running_loop()
    try:
        owner = procfs.pidfd_of(pid)
    except ProcessLookupError:
        raise RlinfActorsError(f"the owner, process {pid}, is gone already") from None
    stack.callback(os.close, owner)
    if started not in (0, pid_start(pid)):
        raise RlinfActorsError(f"the owner, process {pid}, is gone already; its pid is another's now")

    def gone() -> None:
        loop.remove_reader(owner)
        ended()

    loop.add_reader(owner, gone)
    stack.callback(loop.remove_reader, owner)


def _line(stdin: int) -> bytes:
    data = b""
    while not data.endswith(b"\n") and (chunk := os.read(stdin, 1 << 16)):
        data += chunk
    return data
