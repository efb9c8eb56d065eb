"""The arrows of the library's own events: both ends of a call or an item compute the same number.

No number travels, except with messages (`UserMessage.flow`): their receiver may be switched on later than their sender.
A frame of a call or an item already names what an arrow is about: the process that sent it, and a number that this
process gives only once. Both are known at both ends.
"""

from __future__ import annotations

import functools
import zlib

from rlinf_actors.tracing.recorder import Recorder

CALL, MESSAGE, CHANNEL, WAIT = "call", "message", "channel", "wait"
"""Categories of the library's own spans."""

_LOW = 0xFFFFFFFF
_BACK = 0x5A5A5A5A


@functools.lru_cache(maxsize=4096)
def _high(identity: bytes | str, salt: int) -> int:
    whole = identity if isinstance(identity, bytes) else identity.encode()
    return (zlib.crc32(whole.partition(b"#")[0]) ^ salt) << 32


def of_request(identity: bytes | str, call: int) -> int:
    """Return the number of the arrow of a call or channel request, from the process that makes it.

    Args:
        identity: identity of that process (``role:incarnation``) or of a link of it.
        call: number of the request.
    """
    return _high(identity, 0) | call & _LOW


def of_answer(identity: bytes | str, call: int) -> int:
    """Return the number of the arrow of the answer to a request. The arguments are those of `of_request`."""
    return _high(identity, _BACK) | call & _LOW


def note(active: Recorder, name: str, cat: str, *, came: int = 0, goes: int = 0) -> None:
    """Record a short span of this moment, in which an arrow ends (*came*) or begins (*goes*)."""
    span = active.begin(name, cat)
    if came:
        active.flow_in(span, came)
    if goes:
        active.flow_out(span, goes)
    active.end(span)
