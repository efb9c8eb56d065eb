"""The state of a hook of the head, inside control messages. Pure; the house rules of values.py hold."""

from __future__ import annotations

from rlinf_actors.wire.bounds import Name, Text
from rlinf_actors.wire.protocol import Count
from rlinf_actors.wire.values import Value


class HookState(Value, frozen=True):
    """A hook of the head: a program or web page that is told of events. The head counts since its start.

    Attributes:
        name: "command" or "webhook".
        sent: number of events that were delivered.
        failed: number of events whose delivery failed.
        dropped: number of events that were dropped because too many waited.
        waiting: number of events that wait, with the one that is being delivered.
        fault: why the last delivery failed, "" if it did not.
    """

    name: Name
    sent: Count = 0
    failed: Count = 0
    dropped: Count = 0
    waiting: Count = 0
    fault: Text = ""
