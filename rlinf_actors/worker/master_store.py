"""The store of users' process groups listens on one address: MASTER_ADDR, where torch's would listen on all.

A group's workers find each other by a TCPStore, which rank 0 serves at MASTER_PORT when user code calls
``init_process_group``. TCPStore admits any peer. So rank 0's worker gives torch a socket that listens on MASTER_ADDR
only. User code does not change: this module replaces the TCPStore of torch's rendezvous (env:// and tcp://), when that
module is imported. Everything that is not the store at MASTER_ADDR:MASTER_PORT is left to torch.
"""

from __future__ import annotations

import errno
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from rlinf_actors.messaging.process_groups import serve_on

RENDEZVOUS = "torch.distributed.rendezvous"
"""The module of torch that makes the store for ``init_process_group``."""
_ARGUMENTS = ("host_name", "port", "world_size", "is_master", "timeout", "wait_for_workers", "multi_tenant")
"""The first arguments of TCPStore, in order."""
_EVERYWHERE = "the store of process groups at MASTER_PORT listens on every address of this machine: %s"


def serve_on_one_address(env: Mapping[str, str], log: logging.Logger) -> None:
    """Let torch, now or once it is imported, serve the store at MASTER_ADDR:MASTER_PORT of *env* on that address only.

    Called once in rank 0's worker, before user code runs. Where this is not possible, *log* says so when the store is
    made.
    """
    address, port = env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", "")
    if not address or not port.isdigit():
        return
    finder = _Finder(address, int(port), log)
    module = sys.modules.get(RENDEZVOUS)
    if module is not None:  # the template has imported torch
        finder.replace_in(module)
    else:
        sys.meta_path.insert(0, finder)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the module RENDEZVOUS where it is, and replaces its TCPStore after it was executed."""

    def __init__(self, address: str, port: int, log: logging.Logger) -> None:
        self._ours = (address, port)
        self._log = log

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != RENDEZVOUS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def then_replace(module: ModuleType) -> None:
            execute(module)
            self.replace_in(module)

        spec.loader.exec_module = then_replace  # type: ignore[method-assign]
        return spec

    def replace_in(self, module: ModuleType) -> None:
        kind = getattr(module, "TCPStore", None)
        if kind is None:
            self._log.warning(_EVERYWHERE, "this torch makes it in another place")
            return

        def store(*args: Any, **named: Any) -> Any:
            asked = {**dict(zip(_ARGUMENTS, args, strict=False)), **named}  # torch before 2.4 names few of them
            ours = (asked.get("host_name"), asked.get("port")) == self._ours
            if not ours or not asked.get("is_master") or asked.get("master_listen_fd") is not None:
                return kind(*args, **named)
            return self._served(functools.partial(kind, **asked))

        module.TCPStore = store  # type: ignore[attr-defined]

    def _served(self, make: Callable[..., Any]) -> Any:
        try:
            listener = _listener(*self._ours)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:  # torch serves a store there already, or says that it cannot
                self._log.warning(_EVERYWHERE, f"{self._ours[0]} is no address of this process: {error.strerror}")
            return make()
        with listener:
            try:
                return serve_on(listener, make)
            except TypeError:
                self._log.warning(_EVERYWHERE, "this torch takes no socket (master_listen_fd)")
        return make()


def _listener(address: str, port: int) -> socket.socket:
    """Return a socket that listens at *address* only, beside the one with which the worker reserves *port*."""
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(socket.SOMAXCONN)
    except OSError:
        listener.close()
        raise
    return listener
