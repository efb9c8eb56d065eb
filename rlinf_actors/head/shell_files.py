"""What a head has besides its sockets: its files in the state directory, and its hooks."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import NamedTuple

from rlinf_actors.head.audit import AuditLog
from rlinf_actors.head.event_store import EventStore
from rlinf_actors.head.hooks import Hooks
from rlinf_actors.head.notify import Notify
from rlinf_actors.head.store import HeadStore


class HeadFiles(NamedTuple):
    """Arguments of HeadServer, which closes them."""

    store: HeadStore | None
    events: EventStore | None
    audit: AuditLog | None
    hooks: Hooks | None


def open_files(state_dir: str | None, notify: Notify, environ: Mapping[str, str]) -> HeadFiles:
    """Open the files in *state_dir*, and start the threads of the hooks. Loop thread.

    Args:
        state_dir: the state directory, None for a head that keeps no files.
        notify: the checked table [notify].
        environ: the environment of the hooks' programs.

    Raises:
        ConfigError: a file cannot be used.
        OSError: the disk is full.
    """
    store = HeadStore(state_dir) if state_dir is not None else None
    events = EventStore(state_dir) if state_dir is not None else None
    audit = AuditLog(state_dir) if state_dir is not None else None
    hooks = Hooks(notify, environ, asyncio.get_running_loop()) if notify.is_used else None
    return HeadFiles(store, events, audit, hooks)
