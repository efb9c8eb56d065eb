"""Parts of launches whose Launch has not arrived yet. Pure.

Nothing is started, and no name or robot is reserved, before the Launch arrives: a client that ends between two parts
leaves nothing. A restarted head has no parts, and asks for all of them again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from rlinf_actors.head.commands import Refused
from rlinf_actors.head.quotas import Quota, label
from rlinf_actors.head.records import Client
from rlinf_actors.head.validation import check_names, own_namespace
from rlinf_actors.model.restart import launch_of
from rlinf_actors.wire.client_messages import Done, Launch
from rlinf_actors.wire.launch_messages import PART_BYTES, LaunchPart, part_bytes, specs_of
from rlinf_actors.wire.protocol import MAX_SIZE
from rlinf_actors.wire.values import WorkerSpec

if TYPE_CHECKING:
    from rlinf_actors.head.coordinator import Coordinator

LAUNCHES = 16
"""Most launches of one client whose parts the head keeps at a time."""


class _Parts(msgspec.Struct):
    launch: str
    holder: str
    count: int = 0
    workers: list[WorkerSpec] = []


class LaunchParts:
    def __init__(self, head: Coordinator) -> None:
        self._head = head
        self._kept: dict[str, dict[tuple[str, str], _Parts]] = {}  # by client, namespace and group
        self._quota = Quota("launch parts")

    def add(self, client: Client, asked: LaunchPart) -> Done:
        """Keep a part of a launch. A part that the head has already is ignored."""
        own_namespace(client, asked.namespace)
        check_names(group=asked.group, launch=asked.launch)
        of_client, key = self._kept.get(client.incarnation, {}), (asked.namespace, asked.group)
        parts = of_client.get(key)
        if parts is not None and parts.launch == asked.launch and asked.index < parts.count:
            return Done()
        if asked.index == 0:
            self.drop(client.incarnation, *key)
            of_client, parts = self._kept.get(client.incarnation, {}), None
            if len(of_client) >= LAUNCHES:
                raise Refused("usage", f"this {client.role} has {LAUNCHES} launches under way that it has sent in part")
        elif parts is None or parts.launch != asked.launch or asked.index != parts.count:
            raise _missing(asked.group)
        holder = label(client.member)
        self._quota.check(holder, str(client.member))
        if part_bytes(asked.workers) > PART_BYTES:
            raise Refused("usage", f"a part of the launch of {asked.group!r} has more than {PART_BYTES:,} bytes")
        if parts is None:
            parts = self._kept.setdefault(client.incarnation, {})[key] = _Parts(asked.launch, holder)
        parts.count += 1
        self._quota.take(holder)
        parts.workers += specs_of(asked.workers)
        if len(parts.workers) >= MAX_SIZE:
            self.drop(client.incarnation, *key)
            raise Refused("usage", f"group {asked.group!r} would have more than {MAX_SIZE:,} workers")
        return Done()

    def complete(self, client: Client, asked: Launch) -> Launch:
        """Return a launch with the workers of its parts, which the head forgets.

        A launch that was carried out, but whose answer was lost, is sent again without its parts. It then gets the
        workers of the group. Raises Refused if parts are missing.
        """
        if not asked.parts:
            return asked
        key, last = (asked.namespace, asked.group), asked.workers[-1].id if asked.workers else ""
        parts = self._kept.get(client.incarnation, {}).get(key)
        if parts is not None and (parts.launch, parts.count) == (launch_of(last), asked.parts):
            self.drop(client.incarnation, *key)
            return replace(asked, workers=[*parts.workers, *asked.workers], parts=0)
        group = self._head.groups.get(*key)
        if group is not None and last in group.launch and group.whole:
            return replace(asked, workers=[worker.spec for worker in group.members], parts=0)
        raise _missing(asked.group)

    def drop(self, incarnation: str, namespace: str, group: str) -> None:
        """Forget the parts of a client's launch of this name."""
        of_client = self._kept.get(incarnation, {})
        parts = of_client.pop((namespace, group), None)
        for _ in range(parts.count if parts is not None else 0):
            self._quota.free(parts.holder if parts is not None else "")
        if not of_client:
            self._kept.pop(incarnation, None)

    def forget(self, incarnation: str) -> None:
        """Forget all parts of a client that has ended."""
        for namespace, group in list(self._kept.get(incarnation, {})):
            self.drop(incarnation, namespace, group)

    def __len__(self) -> int:
        return sum(map(len, self._kept.values()))


def _missing(group: str) -> Refused:
    return Refused("parts", f"the head does not have all parts of the launch of {group!r}: send them again")
