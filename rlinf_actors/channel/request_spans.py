"""Spans of channel requests in the trace of this process. Each function does nothing while nothing is traced."""

from __future__ import annotations

import weakref
from typing import Any

from rlinf_actors.channel.results import PendingGet
from rlinf_actors.tracing import flows, recorder


def trace_request(request: Any) -> None:
    """Record a put or get as a span that ends when the request is done. The arrow of a get ends there."""
    active = recorder.active
    if active is None:
        return
    span = request.span = active.begin(request._what.replace("()", ""), flows.CHANNEL)
    is_get = isinstance(request, PendingGet)
    found = weakref.ref(request)  # a get that the caller drops must be freed

    def done() -> None:
        ended: Any = found()
        if is_get and ended is not None and ended.call:
            active.flow_in(span, flows.of_answer(ended.peer.own_identity, ended.call))
        active.end(span)

    request._on_done(done)


def trace_sent(put: Any) -> None:
    """Record that the arrow of a put begins: it is on its way to its host."""
    if put.span and (active := recorder.active) is not None:
        active.flow_out(put.span, flows.of_request(put.peer.own_identity, put.call))
