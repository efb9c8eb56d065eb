"""Control messages by which the owner of a group adds ranks to it and removes ranks from it. No secrets."""

from __future__ import annotations

from rlinf_actors.wire import values
from rlinf_actors.wire.bounds import Document, Name, OfLaunch
from rlinf_actors.wire.protocol import ControlMessage, Number


class AddRanks(ControlMessage, frozen=True):
    """Start more workers for a running group, which the sender owns. May be sent twice.

    Answered by Launched, whose group has the new workers alone. They are no members of the group until the sender has
    constructed them and has sent ResizeGroup. The field `resizes` of their specs is -1; their ranks follow the group's
    last rank. If `parts` is not 0, the sender has sent that many LaunchParts before, with all workers but the last,
    which `workers` has.
    """

    namespace: Name
    group: Name
    workers: OfLaunch[values.WorkerSpec]
    parts: int = 0


class ResizeGroup(ControlMessage, frozen=True):
    """Set the number of ranks of a running group, which the sender owns. May be sent twice.

    Added ranks below `world_size` become members. Workers of other ranks are no members any longer. If `stop` is True,
    these get SIGTERM, and SIGKILL after `grace_s` seconds, and Done is sent when they have ended. Otherwise Done is
    sent at once.

    Attributes:
        launch: common beginning of the ids of the group's workers (model.restart.launch_of).
        detail: new description of the group, as in Launch.
    """

    namespace: Name
    group: Name
    launch: Name
    world_size: int
    detail: Document = ""
    stop: bool = True
    grace_s: Number = 0.0
