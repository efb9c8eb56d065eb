"""Blockbuster for this project: fails a test that blocks an event loop of its process, the runtime's own included."""

from __future__ import annotations

import contextlib
import os
import socket
import traceback
from collections.abc import Iterator
from typing import Any

import blockbuster
from blockbuster import BlockBuster, BlockBusterFunction

_BESIDE = ("socket.getaddrinfo", "socket.gethostbyname", "io.open", "os.open", "os.lstat", "subprocess.Popen.wait")
"""What else waits for a disk, a name server or a process."""
_ALLOWED = (
    ("os.getcwd", "cluster/service.py", "_resolved"),  # asks the kernel alone
    ("os.getcwd", "group/launcher.py", "_cwd"),
    ("os.stat", "net/unix_sockets.py", "check_place"),  # looks a path up, as connect(2) does right after it
    ("os.lstat", "net/unix_sockets.py", "check_place"),
)


@contextlib.contextmanager
def no_blocking() -> Iterator[None]:
    """Raise where a running event loop of this process is blocked, and again at the end, wherever that was caught."""
    caught: list[str] = []

    class Blocked(blockbuster.BlockingError):
        def __init__(self, function: str) -> None:
            super().__init__(function)
            caught.append(f"{function}\n{''.join(traceback.format_stack()[-14:-1])}")

    buster = BlockBuster()
    for name in _BESIDE:
        buster.functions[name] = BlockBusterFunction(None, name)
    for function in buster.functions.values():
        function.can_block_predicate = _or_in_memory(function.can_block_predicate)
    for name, file, caller in _ALLOWED:
        buster.functions[name].can_block_in(file, caller)
    for function in buster.functions.values():  # on the runtime's loop, which has nobody to serve before and after
        function.can_block_in("cluster/local_daemon.py", ("start", "stop"))
    module = blockbuster.blockbuster
    before, module.BlockingError = module.BlockingError, Blocked
    buster.activate()
    try:
        yield
    finally:
        buster.deactivate()
        module.BlockingError = before
    assert not caught, "\n\n".join(caught)


def _or_in_memory(predicate: Any) -> Any:
    """/proc and /sys are no disk, MSG_DONTWAIT does not wait, and AI_NUMERICHOST asks no name server."""

    def may_block(*args: Any, **kwargs: Any) -> bool:
        path = args[0] if args else None
        if not isinstance(path, (str, os.PathLike)):
            path = getattr(path, "name", None)  # of an open file
        memory = isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(("/proc/", "/sys/", "/dev/"))
        at_once = any(isinstance(given, socket.MsgFlag) and given & socket.MSG_DONTWAIT for given in args[1:])
        numeric = bool(kwargs.get("flags", 0) & socket.AI_NUMERICHOST)
        return memory or at_once or numeric or bool(predicate(*args, **kwargs))

    return may_block
