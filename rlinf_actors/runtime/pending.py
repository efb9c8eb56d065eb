"""Pending: a call that waits for the answers of a worker, as its Peer keeps it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, Union, cast

import msgspec

from rlinf_actors.model.buffers import Buffer
from rlinf_actors.wire import frames
from rlinf_actors.wire.payload import NO_PARTS, AuthenticatedParts

LISTENED = (
    frames.Held, frames.Returned, frames.Facts, frames.Released, frames.LaneEnded, frames.LaneKey, frames.ChildIs,
    frames.ChildEnded,
)  # fmt: skip
"""Frames that go to the listener whose number they carry."""
Answers = Union[frames.Ok, frames.Item, frames.Raised, frames.Runs, frames.Relayed]
ANSWERS = (frames.Ok, frames.Item, frames.Raised, frames.Runs, frames.Relayed)
RESULTS = (*ANSWERS, frames.Oks)
"""Frames that answer calls. If a handler raises, only its call fails."""
SHARED = (frames.ChannelAccepted, frames.ChannelItems)
"""Frames that answer several calls. Each call gets one of the parts, if there are any."""
_Shared = Union[frames.ChannelAccepted, frames.ChannelItems]


class Pending(Protocol):
    """A call that waits for one or more answers of a worker; the Peer of the worker keeps it until the call ends."""

    @property
    def anywhere(self) -> bool:
        """True if any thread may call `answer`, False if only the loop thread may."""

    def answer(self, frame: frames.AnyFrame, parts: AuthenticatedParts) -> bool:
        """Handle one answer of the worker. Return True if it was the last one. Called for one answer at a time."""

    def fail(self, error: Exception) -> None:
        """End the call with *error*, because the worker has ended or cannot be reached. Called on any thread."""


class PendingTogether(Protocol):
    """A class of pending calls of which many may have their answers in one frame."""

    @staticmethod
    def answer_all(answered: Sequence[tuple[Any, AuthenticatedParts]], frame: frames.AnyFrame) -> None:
        """Handle the answers in *frame* to calls of this class, each given with its parts. Any thread if `anywhere`."""


class PendingRequest(msgspec.Struct, eq=False):
    """A pending call that has one answer and is handled by two callbacks; only one of them is called, once.

    Attributes:
        answered: called on the loop thread with the answer.
        failed: called on any thread with an error, if the worker has ended or cannot be reached.
    """

    answered: Callable[[frames.AnyFrame, AuthenticatedParts], object]
    failed: Callable[[Exception], object]
    anywhere: bool = False

    def answer(self, frame: frames.AnyFrame, parts: AuthenticatedParts) -> bool:
        self.answered(frame, parts)
        return True

    def fail(self, error: Exception) -> None:
        self.failed(error)


def fail_unreadable(waiting: dict[int, Pending], header: bytes, error: Exception) -> None:
    """Fail the call in *waiting* that *header* answers, which cannot be decoded for *error*: no other answer comes."""
    number = frames.number_of(header)
    pending = None if number is None else waiting.pop(number, None)
    if pending is not None:
        pending.fail(error)


def any_thread(waiting: Mapping[int, Pending], frame: frames.AnyFrame) -> bool:
    """Return True if *frame* answers several calls in *waiting*, and any thread may handle it."""
    if type(frame) is frames.Oks:
        kinds = {type(pending) for pending in map(waiting.get, frame.ids)} - {type(None)}
        return all(getattr(kind, "anywhere", False) is True for kind in kinds)
    if not isinstance(frame, SHARED) or not frame.ids:
        return False
    pending = waiting.get(frame.ids[0])  # they belong to one channel
    return pending is not None and pending.anywhere


def answer_several(waiting: dict[int, Pending], frame: frames.Oks | _Shared, parts: list[Buffer]) -> None:
    """Handle *frame*, which answers several of the calls in *waiting*."""
    if isinstance(frame, frames.Oks):
        _answer_each(waiting, frame, parts)
    else:
        _answer_together(waiting, frame, parts)


def _answer_each(waiting: dict[int, Pending], frame: frames.Oks, parts: list[Buffer]) -> None:
    """Hand each result in *frame* to its call, and remove the call from *waiting*.

    If the handler of a call raises, that call stays in *waiting*, to be failed. The others get their results first.
    """
    each = map(AuthenticatedParts, zip(parts, strict=True)) if parts else itertools.repeat(NO_PARTS)
    failed: Exception | None = None
    for call, seconds, own in zip(frame.ids, frame.seconds, each, strict=bool(parts)):
        pending = waiting.get(call)
        try:
            if pending is not None and pending.answer(frames.Ok(call, seconds), own):
                waiting.pop(call, None)
        except Exception as error:  # noqa: BLE001 - raised when all have their results
            failed = failed or error
    if failed is not None:
        raise failed


def _answer_together(waiting: dict[int, Pending], frame: _Shared, parts: list[Buffer]) -> None:
    """Handle one answer to several of the calls in *waiting*: part n, if there are parts, answers call `ids[n]`.

    If a handler raises, the calls that may not have their answers are in *waiting* again, to be failed.
    """
    each: Iterable[AuthenticatedParts]
    each = map(AuthenticatedParts, zip(parts, strict=True)) if parts else itertools.repeat(AuthenticatedParts())
    found = list(zip(each, map(waiting.pop, frame.ids, itertools.repeat(None)), strict=False))
    kinds = {type(pending) for _, pending in found} - {type(None)}
    try:
        while kinds:
            kind = next(iter(kinds))
            answered = [(pending, own) for own, pending in found if type(pending) is kind]
            cast(PendingTogether, kind).answer_all(answered, frame)
            kinds.discard(kind)
    except BaseException:
        own = ((id, pending) for id, (_, pending) in zip(frame.ids, found, strict=False) if pending is not None)
        waiting.update((id, pending) for id, pending in own if type(pending) in kinds)
        raise


class Listeners:
    """The callbacks for frames of `LISTENED`, by the number in the frame. Any thread."""

    def __init__(self) -> None:
        self._all: dict[int, Callable[[frames.AnyFrame], object]] = {}
        self._anywhere: set[int] = set()

    def __len__(self) -> int:
        return len(self._all)

    def add(self, number: int, listener: Callable[[frames.AnyFrame], object], anywhere: bool) -> None:
        if anywhere:
            self._anywhere.add(number)
        self._all[number] = listener

    def remove(self, number: int) -> None:
        self._all.pop(number, None)
        self._anywhere.discard(number)

    def anywhere(self, number: int) -> bool:
        """Return True if any thread may call the listener, and not the loop thread alone."""
        return number in self._anywhere

    def hear(self, number: int, frame: frames.AnyFrame) -> None:
        listener = self._all.get(number)
        if listener is not None:
            listener(frame)

    def clear(self) -> None:
        self._all.clear()


class Withheld:
    """The exceptions that answer calls to a worker while it is being constructed. Loop thread.

    If the constructor raises, the worker answers the waiting calls with that exception, and then the Create. The owner
    of the group fails these calls with the answer to the Create, so that the user gets one error, once.

    Attributes:
        create: number of the Create that the worker has not answered; 0 if it is not being constructed.
    """

    def __init__(self) -> None:
        self.create = 0
        self._answers: dict[int, tuple[frames.Raised, AuthenticatedParts]] = {}

    def keeps(self, frame: Answers, parts: AuthenticatedParts) -> bool:
        """Keep an answer and return True, if it is to be withheld."""
        if type(frame) is not frames.Raised or frame.id == self.create:
            return False
        self._answers[frame.id] = (frame, parts)
        return True

    def end(self) -> list[tuple[frames.Raised, AuthenticatedParts]]:
        """Withhold nothing any more, and return what was withheld."""
        answers, self.create, self._answers = self._answers, 0, {}
        return list(answers.values())
