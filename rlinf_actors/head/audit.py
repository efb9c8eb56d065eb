"""The audit log: who did what from where, as lines of JSON in files of the head's state directory.

The event log (`head.event_log`) is bounded and ends with the head; these files stay. `accepted.jsonl` has each action
that the head took for a member, and `refused.jsonl` what it refused: so refusals, however many, push out no action.
Each file is only appended to, and rotated by its size. A thread of its own writes, so a slow disk delays no message.
"""

from __future__ import annotations

import io
import json
import logging
import logging.handlers
import os
import queue
import sys
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from typing import Any

from rlinf_actors.errors import ConfigError
from rlinf_actors.exhaustion import explain
from rlinf_actors.security.members import Member
from rlinf_actors.wire import agent_messages, client_messages, key_messages, resize_messages

log = logging.getLogger(__name__)

DIRECTORY = "audit"
"""Name of the directory of the files in the state directory."""
FILE_BYTES = 16 << 20
FILES = 8
"""Most files of a kind, and bytes of each: some 400,000 lines are kept."""
WAITING = 10_000
"""Most lines that wait for the disk before refusals are counted instead of written."""
PENDING = 10_000
"""Most requests that the head has not answered. Of further ones the outcome is not known, and the line says so."""


def _of_group(body: Any) -> str:
    return f"group {body.group!r} of namespace {body.namespace!r}"


def _estop(body: client_messages.EStop) -> str:
    scope = "the cluster" if body.namespace is None else f"namespace {body.namespace!r}"
    return f"release of the stop of {scope}" if body.release else f"stop of {scope}"


ACTIONS: Mapping[type[Any], Callable[[Any], str]] = {
    agent_messages.AgentHello: lambda body: f"node {body.node.hostname!r} ({body.node.node_id})",
    agent_messages.ClientHello: lambda body: f"namespace {body.namespace!r}, as {body.role}",
    client_messages.Launch: _of_group,
    client_messages.Detach: _of_group,
    client_messages.StopGroup: _of_group,
    client_messages.EndGroup: _of_group,
    resize_messages.AddRanks: _of_group,
    resize_messages.ResizeGroup: _of_group,
    client_messages.DrainNode: lambda body: f"node {body.node_id!r}" + " (undo)" * body.undo,
    client_messages.EStop: _estop,
    client_messages.StopCluster: lambda body: "the cluster",
    key_messages.AddKey: lambda body: f"{body.role} {body.name!r}",
    key_messages.RevokeKey: lambda body: f"{body.role or 'all roles'} {body.name!r}",
    key_messages.Enroll: lambda body: "the member of the join token",
    key_messages.RotateKey: lambda body: "its own key",
    client_messages.ReadTrace: lambda body: f"namespace {body.question.namespace!r}",
}
"""The requests that are actions, and what each acts on. Questions that change nothing are not logged."""


class AuditLog:
    """Writes the audit log in *state_dir*. Loop thread.

    Raises:
        ConfigError: the files cannot be made.
    """

    def __init__(self, state_dir: str) -> None:
        directory = os.path.join(state_dir, DIRECTORY)
        self._pending: dict[tuple[bytes, int], dict[str, str]] = {}
        self._lines: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._left_out = 0
        self._loggers: dict[str, logging.Logger] = {}
        self._files: list[_File] = []
        try:
            os.makedirs(directory, mode=0o700, exist_ok=True)
            for name in ("accepted", "refused"):
                self._files.append(_File(name, os.path.join(directory, f"{name}.jsonl")))
                self._loggers[name] = logging.Logger(name)
                self._loggers[name].addHandler(logging.handlers.QueueHandler(self._lines))
        except OSError as error:
            raise ConfigError(f"the head cannot write its audit log: {error}") from None
        self._writer = logging.handlers.QueueListener(self._lines, *self._files)
        self._writer.start()

    def begun(self, peer: bytes, number: int, body: object, member: Member, address: str) -> None:
        """Note a request of *member* from *address*. The line is written with the head's answer."""
        what = ACTIONS.get(type(body))
        if what is None:
            return
        said = {"time": _now(), "member": str(member), "key": member.key, "from": address}
        said |= {"verb": type(body).__name__, "object": what(body)}
        by, reason = getattr(body, "by", ""), getattr(body, "reason", "")
        said |= {"by": by} if by else {}
        said |= {"reason": reason} if reason else {}
        if len(self._pending) >= PENDING:
            first = next(iter(self._pending))
            self._write("accepted", {**self._pending.pop(first), "outcome": "not answered yet"})
        self._pending[peer, number] = said

    def answered(self, peer: bytes, number: int) -> None:
        """Write that the request of *peer* with this number was accepted, if it is an action."""
        said = self._pending.pop((peer, number), None)
        if said is not None:
            self._write("accepted", {**said, "outcome": "accepted"})

    def refused(self, peer: bytes, number: int, kind: str, text: str) -> None:
        """Write that the request of *peer* with this number was refused, if it is an action."""
        said = self._pending.pop((peer, number), None)
        if said is not None:
            self._write("refused", {**said, "outcome": f"refused ({kind})", "why": text})

    def noted(self, text: str) -> None:
        """Write a refusal of the event log: of connections, of messages, and of what is no action."""
        self._write("refused", {"time": _now(), "outcome": "refused", "why": text})

    def close(self) -> None:
        """Write what is left, and close the files. Requests that were not answered get a line, too."""
        for said in self._pending.values():
            self._write("accepted", {**said, "outcome": "not answered: the head ended"})
        self._pending.clear()
        self._writer.stop()
        for file in self._files:
            file.close()

    def _write(self, name: str, said: dict[str, str]) -> None:
        if name == "refused":
            if self._lines.qsize() >= WAITING:
                self._left_out += 1
                return
            if self._left_out:
                said, self._left_out = {**said, "left out before": str(self._left_out)}, 0
        self._loggers[name].info("%s", json.dumps(said, ensure_ascii=True))


class _File(logging.handlers.RotatingFileHandler):
    """A file that only its owner reads. A link in its place is not followed. A failure to write is logged once."""

    def __init__(self, name: str, path: str) -> None:
        self._failing = False
        self._error: BaseException | None = None
        super().__init__(path, maxBytes=FILE_BYTES, backupCount=FILES - 1, encoding="utf-8")
        self.addFilter(lambda record: record.name == name)

    def _open(self) -> Any:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        file = os.fdopen(os.open(self.baseFilename, flags, 0o600), "ab", buffering=0)
        return io.TextIOWrapper(file, encoding="utf-8", write_through=True)  # keeps no line

    def emit(self, record: logging.LogRecord) -> None:
        self._error = None
        super().emit(record)
        failing = self._error is not None
        if failing and not self._failing:
            text = "the audit log %s cannot be written (%s): the head goes on without it; make room there"
            log.error(
                text, self.baseFilename, explain(self._error) if isinstance(self._error, OSError) else self._error
            )
        elif self._failing and not failing:
            log.warning("the audit log %s is written again; lines are missing", self.baseFilename)
        self._failing = failing

    def handleError(self, record: logging.LogRecord) -> None:
        self._error = sys.exc_info()[1]


def _now() -> str:
    return datetime.fromtimestamp(time.time(), timezone.utc).isoformat(timespec="milliseconds")
