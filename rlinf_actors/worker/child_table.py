"""The child members of one worker, and the open questions of peers where a child listens. Does no I/O. I/O thread.

A child is named by its path: the ranks below the rank of the worker. A peer that asks for a path with WhereIs gets the
endpoint of that child (ChildIs), if need be when the child registers, and later the child's end (ChildEnded).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec

from rlinf_actors.wire import frames
from rlinf_actors.wire.values import Endpoint, ExitReport

MAX_CHILDREN = 4096
"""Most living children of one worker, and most ended children that the worker remembers."""
MAX_QUESTIONS = 4096
"""Most unanswered WhereIs frames of one link. A peer sends one for each child."""

Path = tuple[int, ...]
Outgoing = tuple[bytes, frames.AnyFrame]
"""(identity of the link, frame to send over the link)."""


class ChildRefused(Exception):
    """Raised if a process may not become the child member that it asked to be. The text gives the reason."""


class Child(msgspec.Struct):
    """What a worker knows about one of its child members.

    *endpoint* is None until the child listens. *exit* is None until the child has ended.
    """

    id: str
    path: Path
    pid: int
    endpoint: Endpoint | None = None
    exit: ExitReport | None = None


class ChildTable:
    def __init__(self, worker_id: str, name: str) -> None:
        self._worker_id = worker_id
        self._name = name
        self._numbers = itertools.count(1)
        self._living: dict[str, Child] = {}  # by id
        self._at: dict[Path, Child] = {}  # the living child or the last that ended; oldest first
        self._questions: dict[bytes, dict[int, Path]] = {}
        self._askers: dict[Path, dict[tuple[bytes, int], None]] = {}

    def name_of(self, path: Sequence[int]) -> str:
        return ":".join([self._name, *map(str, path)])

    def reserve(self, path: Path, pid: int) -> Child:
        """Record process *pid* as the child at *path*, and return the new child.

        Raises:
            ChildRefused: the path has a living child, the process is a child already, or there are too many children.
        """
        known = self._at.get(path)
        if known is not None and known.exit is None:
            raise ChildRefused(
                f"{self.name_of(path)} is process {known.pid}, which runs: end that one first, or take another rank"
            )
        other = next((child for child in self._living.values() if child.pid == pid), None)
        if other is not None:  # two threads of the process may enter at once, so it cannot know
            raise ChildRefused(
                f"process {pid} is {self.name_of(other.path)} already: {self.name_of(path)} needs a process of its own"
            )
        if len(self._living) >= MAX_CHILDREN:
            raise ChildRefused(f"{self._name} has {MAX_CHILDREN} children, as many as a worker may have")
        child = Child(f"{self._worker_id}_{next(self._numbers)}", path, pid)
        self._living[child.id] = child
        self._at.pop(path, None)
        self._at[path] = child
        if len(self._at) > 2 * MAX_CHILDREN:
            ended = [path for path, one in self._at.items() if one.exit is not None]
            for path in ended[: len(ended) - MAX_CHILDREN]:
                del self._at[path]
        return child

    def listens(self, id: str, endpoint: Endpoint) -> list[Outgoing]:
        """Record that the child *id* listens at *endpoint*.

        Return the answers for the peers that asked for the child.
        """
        child = self._living[id]
        child.endpoint = endpoint
        return [(link, frames.ChildIs(number, id, endpoint)) for link, number in self._askers.get(child.path, ())]

    def ended(self, id: str, exit: ExitReport) -> list[Outgoing]:
        """Record that the child *id* has ended. Return the frames that tell this to the peers that asked for the child.

        If the child never listened, the list is empty: these peers go on waiting for a process that takes the child's
        path.
        """
        child = self._living.pop(id)
        child.exit = exit
        if child.endpoint is None:
            del self._at[child.path]
            return []
        asked = self._askers.pop(child.path, {})
        for link, number in asked:
            del self._questions[link][number]
        return [(link, frames.ChildEnded(number, id, exit)) for link, number in asked]

    def asked(self, link: bytes, question: frames.WhereIs) -> list[Outgoing]:
        """Return the answer to a peer's question where a child listens; [] while the child does not listen yet."""
        path, number = tuple(question.path), question.id
        child = self._at.get(path)
        if child is not None and child.exit is not None:
            return [(link, frames.ChildEnded(number, child.id, child.exit))]
        open_ = self._questions.setdefault(link, {})
        if number in open_:
            return []  # a repetition: each question has a number of its own
        if len(open_) >= MAX_QUESTIONS:
            why = f"{self._name} was asked for more than {MAX_QUESTIONS} children by one process"
            return [(link, frames.ChildEnded(number, "", ExitReport("exited", reason=why)))]
        open_[number] = path
        self._askers.setdefault(path, {})[link, number] = None
        if child is None or child.endpoint is None:
            return []
        return [(link, frames.ChildIs(number, child.id, child.endpoint))]

    def forget(self, link: bytes) -> None:
        """Drop the questions that came over *link*, because the peer at its other end has ended."""
        for number, path in self._questions.pop(link, {}).items():
            asked = self._askers[path]
            del asked[link, number]
            if not asked:
                del self._askers[path]
