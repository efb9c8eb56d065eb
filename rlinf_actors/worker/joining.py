"""Joining: which links a worker refuses, what it tells their peers, and how it logs that."""

from __future__ import annotations

import hmac
import logging
import sys
from typing import NamedTuple

from rlinf_actors import version
from rlinf_actors.wire import frames
from rlinf_actors.wire.protocol import PROTOCOL, what_to_upgrade

log = logging.getLogger(__name__)


class Refusal(NamedTuple):
    """Why a link is refused: a kind of `frames.Rejected`, a text for the peer, and one for this worker's log."""

    kind: str
    text: str
    why: str


def refusal(join: frames.Join, name: str, worker_id: str, token: str) -> Refusal | None:
    """Return why the worker *name* with *worker_id* refuses the link that begins with *join*; None if it does not.

    *token* is the token of the worker's job.
    """
    if join.protocol != PROTOCOL:
        theirs, ours = f"protocol {join.protocol}", f"protocol {PROTOCOL}"
        advice = what_to_upgrade(join.protocol, join.name, f"the node of {name}")
        versions = f"{join.name} is rlinf-actors {join.version} ({theirs}), {name} is {version.VERSION}"
        return Refusal("protocol", f"{versions} ({ours}): {advice}", f"it speaks {theirs}, not {ours}")
    if not hmac.compare_digest(join.token.encode(), token.encode()):
        text = f"{join.name} does not belong to the job of {name}"
        return Refusal("authentication", text, "it does not have its job's token")
    if join.worker_id != worker_id:
        text = f"{join.name} looked for another worker at this address"
        return Refusal("authentication", text, "it looked for another worker")
    if join.byte_order != sys.byteorder:
        text = (
            f"{join.name} is on a {join.byte_order[:6]}-endian machine, {name} on a {sys.byteorder}-endian one: "
            "tensors travel as they lie in memory, so all processes of a job need machines of one byte order"
        )
        return Refusal("protocol", text, f"its machine is {join.byte_order[:6]}-endian")
    return None


class RejectedPeers:
    """Counts and logs the connections and links that the sockets of this worker reject. I/O thread only."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, text: str, times: int = 1) -> None:
        """Count *times* rejections. Log the 1st, 10th, 100th, ... with *text*, so no flood can fill the log."""
        digits, self.count = len(str(self.count)) if self.count else 0, self.count + times
        if len(str(self.count)) > digits:
            log.warning("refused %s (%d so far)", text, self.count)
