"""Several calls of one method, and several results, travel as one frame. Pure.

A burst of calls then costs each end one frame to encode, one to send and one to decode. The sender queues Call and Ok
objects in place of encoded headers, and the socket joins what waits for one peer when it sends (`net.message_socket`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Union

from rlinf_actors.model.buffers import Buffer
from rlinf_actors.wire import frames
from rlinf_actors.wire.frames import Call, Ok

Header = Union[bytes, Call, Ok]
"""An encoded header; or a Call or Ok that may be joined with its neighbours, and has one part at most."""

MOST_BYTES = 256 << 10
"""Bytes of parts after which a frame takes no further call, so that chunks stay short."""


def joined(messages: Iterable[tuple[Header, Sequence[Buffer]]]) -> list[tuple[bytes, Sequence[Buffer]]]:
    """Return the messages with encoded headers: each run of Calls of one method, and each run of Oks, is one message.

    Only calls and results with equally many parts form a run.
    """
    made: list[tuple[bytes, Sequence[Buffer]]] = []
    run: list[Any] = []
    inside: list[Buffer] = []
    kind: object = None
    width = size = 0
    method, deadline_s = "", 0.0
    for header, parts in messages:
        fits = type(header) is kind and len(parts) == width and size < MOST_BYTES and len(run) < frames.MAX_TOGETHER
        if not fits or (type(header) is Call and (header.method != method or header.deadline_s != deadline_s)):
            _end(run, inside, made)
            run, inside = [], []
            kind, width, size = type(header), len(parts), 0
            if isinstance(header, bytes):
                made.append((header, parts))
                kind = None
                continue
            if isinstance(header, Call):
                method, deadline_s = header.method, header.deadline_s
        run.append(header)
        if width:
            inside.append(parts[0])
            size += len(parts[0])
    _end(run, inside, made)
    return made


def _end(run: list[Any], parts: list[Buffer], made: list[tuple[bytes, Sequence[Buffer]]]) -> None:
    """Add to *made* the message of the calls, or results, in *run*."""
    if not run:
        return
    frame: frames.AnyFrame = run[0]
    if len(run) > 1:
        ids = [one.id for one in run]
        if isinstance(frame, Call):
            frame = frames.Calls(ids, frame.method, frame.deadline_s)
        else:
            frame = frames.Oks(ids, [one.seconds for one in run])
    made.append((frames.encode(frame), parts))
