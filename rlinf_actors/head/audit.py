"""The audit log: who did what from where, as lines of JSON in files of the head's state directory.

The event log (`head.event_log`) has the newest events only; these files have more. `accepted.jsonl` has each action
that the head took for a member, and `refused.jsonl` what it refused: so refusals, however many, push out no action.
Each file is only appended to, and rotated by its size. A thread of its own writes, so a slow disk delays no message.
"""

from __future__ import annotations

import io
import json
import logging
import logging.handlers
import math
import os
import queue
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from typing import Any

from rlinf_actors.errors import ConfigError
from rlinf_actors.exhaustion import explain
from rlinf_actors.security.members import Member
from rlinf_actors.wire import agent_messages, client_messages, key_messages, resize_messages
from rlinf_actors.wire.debug_values import DebugQuestion
from rlinf_actors.wire.node_questions import said as said_by
from rlinf_actors.wire.node_questions import verb
from rlinf_actors.wire.stack_values import StackQuestion
from rlinf_actors.wire.trace_values import TraceQuestion, TraceSwitch

log = logging.getLogger(__name__)

DIRECTORY = "audit"
"""Name of the directory of the files in the state directory."""
FILE_BYTES = 16 << 20
FILES = 8
"""Most files of a kind, and bytes of each: some 400,000 lines are kept."""
WAITING = 10_000
"""Most lines that wait for the disk before refusals are counted instead of written."""
SHARE, REFILL_S = 10_000, 5.0
"""Lines of accepted actions that a member, with its jobs, may write at once, and seconds after which it may write
another: some 27,000 in the first day. Further actions are counted, so no member pushes out the lines of others."""
SHARES = 4096
"""Most members whose shares are known. The share of the first one begins anew if there are more."""
PENDING = 10_000
"""Most requests that the head has not answered. Of further ones the outcome is not known, and the line says so."""


def _of_group(body: Any) -> str:
    return f"group {body.group!r} of job {body.namespace!r}"


def _estop(body: client_messages.EStop) -> str:
    if body.wait:
        return ""
    scope = "the cluster" if body.namespace is None else f"job {body.namespace!r}"
    return f"release of the stop of {scope}" if body.release else f"stop of {scope}"


def _debugged(said: DebugQuestion) -> str:
    """Return the worker that gets a debugger, or input for it. A question for more output is no action."""
    return f"worker {said.worker!r} of job {said.namespace!r}" if said.input or not said.number else ""


ACTIONS: Mapping[type[Any], Callable[[Any], str]] = {
    agent_messages.AgentHello: lambda body: f"node {body.node.hostname!r} ({body.node.node_id})",
    agent_messages.ClientHello: lambda body: f"job {body.namespace!r}, as {body.role}",
    client_messages.Launch: _of_group,
    client_messages.Detach: _of_group,
    client_messages.StopGroup: _of_group,
    client_messages.EndGroup: _of_group,
    client_messages.KillWorker: lambda body: f"worker {body.worker_id!r} of {_of_group(body)}",
    resize_messages.AddRanks: _of_group,
    resize_messages.ResizeGroup: _of_group,
    client_messages.DrainNode: lambda body: f"node {body.node_id!r}" + " (undo)" * body.undo,
    client_messages.EStop: _estop,
    client_messages.StopCluster: lambda body: "the cluster",
    key_messages.AddKey: lambda body: f"{body.role} {body.name!r}",
    key_messages.RevokeKey: lambda body: f"{body.role or 'all roles'} {body.name!r}",
    key_messages.Enroll: lambda body: "the node or driver of the join token",
    key_messages.RotateKey: lambda body: "its own key",
    TraceQuestion: lambda asked: f"job {asked.namespace!r}",
    TraceSwitch: lambda asked: f"job {asked.namespace!r} {'on' if asked.events else 'off'}",
    DebugQuestion: _debugged,
    StackQuestion: lambda asked: f"job {asked.namespace!r}, by {asked.level!r}",
}
"""The requests and questions to nodes that are actions, and what each acts on, "" for one that acts on nothing.
Questions that change nothing are not logged."""


class AuditLog:
    """Writes the audit log in *state_dir*. Loop thread.

    Raises:
        ConfigError: the files cannot be made.
    """

    def __init__(self, state_dir: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        directory = os.path.join(state_dir, DIRECTORY)
        self._pending: dict[tuple[bytes, int], tuple[dict[str, str], str]] = {}  # lines, and whose share they take
        self._shares: dict[str, _Share] = {}
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

    def begun(self, peer: bytes, number: int, body: object, member: Member, address: str, whose: str = "") -> None:
        """Note a request of *member* from *address*. The line is written with the head's answer. It takes a part of the
        share of *whose*, "" for that of the member.
        """
        asked = said_by(body)
        what = ACTIONS.get(type(asked), lambda asked: "")(asked)
        if not what:
            return
        said = {"time": _now(), "member": str(member), "key": member.key, "from": address}
        said |= {"verb": verb(body), "object": what}
        by, reason = getattr(body, "by", ""), getattr(body, "reason", "")
        said |= {"by": by} if by else {}
        said |= {"reason": reason} if reason else {}
        if len(self._pending) >= PENDING:
            first = next(iter(self._pending))
            earlier, share = self._pending.pop(first)
            self._accepted({**earlier, "outcome": "not answered yet"}, share)
        self._pending[peer, number] = said, whose or str(member)

    def answered(self, peer: bytes, number: int) -> None:
        """Write that the request of *peer* with this number was accepted, if it is an action."""
        said, share = self._pending.pop((peer, number), (None, ""))
        if said is not None:
            self._accepted({**said, "outcome": "accepted"}, share)

    def refused(self, peer: bytes, number: int, kind: str, text: str) -> None:
        """Write that the request of *peer* with this number was refused, if it is an action."""
        said, _ = self._pending.pop((peer, number), (None, ""))
        if said is not None:
            self._refused({**said, "outcome": f"refused ({kind})", "why": text})

    def noted(self, text: str) -> None:
        """Write a refusal of the event log: of connections, of messages, and of what is no action."""
        self._refused({"time": _now(), "outcome": "refused", "why": text})

    def close(self) -> None:
        """Write what is left, and close the files. Requests that were not answered get a line, too."""
        for said, share in self._pending.values():
            self._accepted({**said, "outcome": "not answered: the head ended"}, share)
        self._pending.clear()
        for whose in list(self._shares):
            self._forget_share(whose)
        self._writer.stop()
        for file in self._files:
            file.close()

    def _accepted(self, said: dict[str, str], whose: str) -> None:
        share = self._shares.setdefault(whose, _Share())
        if share.take(said["verb"], self._clock()):
            self._write("accepted", {**said, **share.told()})
        if len(self._shares) > SHARES:
            self._forget_share(next(one for one in self._shares if one != whose))

    def _forget_share(self, whose: str) -> None:
        if told := self._shares.pop(whose).told():
            self._write("accepted", {"time": _now(), "member": whose, **told})

    def _refused(self, said: dict[str, str]) -> None:
        if self._lines.qsize() >= WAITING:
            self._left_out += 1
            return
        if self._left_out:
            said, self._left_out = {**said, "left out before": str(self._left_out)}, 0
        self._write("refused", said)

    def _write(self, name: str, said: dict[str, str]) -> None:
        self._loggers[name].info("%s", json.dumps(said, ensure_ascii=True))


class _Share:
    """The lines of accepted actions that a member may write: SHARE, and one more after each REFILL_S."""

    def __init__(self) -> None:
        self._left, self._at = 0.0, -math.inf
        self.left_out: Counter[str] = Counter()  # actions without a line, by verb

    def take(self, verb: str, now: float) -> bool:
        """Return True if the member may write a line now. Otherwise count the action."""
        self._left = min(SHARE, self._left + (now - self._at) / REFILL_S)
        self._at = now
        if self._left < 1:
            self.left_out[verb] += 1
            return False
        self._left -= 1
        return True

    def told(self) -> dict[str, str]:
        """Return what the next line says of the actions that have none; {} if there are none. They count no more."""
        text = ", ".join(f"{number} {verb}" for verb, number in sorted(self.left_out.items()))
        self.left_out.clear()
        return {"left out before": text} if text else {}


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
