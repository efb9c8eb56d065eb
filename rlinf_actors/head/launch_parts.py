"""Parts of launches whose Launch or AddRanks has not arrived yet. Pure.

Nothing is started, and no name or robot is reserved, before that message arrives: a client that ends between two parts
leaves nothing. A restarted head has no parts, and asks for all of them again.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from rlinf_actors.head.commands import Refused
from rlinf_actors.head.owners import processes
from rlinf_actors.head.quotas import Quota, label
from rlinf_actors.head.records import Client, Group
from rlinf_actors.head.slices import PIECE, Sliced, pieces
from rlinf_actors.head.validation import own_namespace
from rlinf_actors.model.restart import launch_of
from rlinf_actors.wire.client_messages import Done, Launch
from rlinf_actors.wire.launch_messages import PART_BYTES, PART_RANKS, LaunchPart, part_bytes, specs_of
from rlinf_actors.wire.protocol import MAX_SIZE
from rlinf_actors.wire.resize_messages import AddRanks
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

    def add(self, client: Client, asked: LaunchPart) -> Sliced[Done]:
        """Keep a part of a launch. A part that the head has already is ignored."""
        own_namespace(client, asked.namespace)
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
        self._quota.check(holder, str(client.member), lambda: self._held(holder))
        if sum(len(batch.rows) for batch in asked.workers) > PART_RANKS:
            raise Refused("usage", f"a part of the launch of {asked.group!r} has more than {PART_RANKS:,} workers")
        if part_bytes(asked.workers) > PART_BYTES:
            raise Refused("usage", f"a part of the launch of {asked.group!r} has more than {PART_BYTES:,} bytes")
        specs: list[WorkerSpec] = []
        for batch in asked.workers:
            for rows, more in pieces(batch.rows, 5 * PIECE):
                specs += specs_of([replace(batch, rows=list(rows))])
                if more:
                    yield
        if self._head.clients.get(client.incarnation) is not client:
            raise Refused("node_lost", f"the {client.role} that launches group {asked.group!r} has ended")
        if parts is None:
            parts = self._kept.setdefault(client.incarnation, {})[key] = _Parts(asked.launch, holder)
        parts.count += 1
        self._quota.take(holder)
        parts.workers += specs
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
        key, last = (asked.namespace, asked.group), asked.workers[-1] if asked.workers else None
        workers = self._take(client, asked, launch_of(last.id) if last is not None else "")
        if workers is not None:
            return replace(asked, workers=workers, parts=0)
        group = self._head.groups.get(*key)
        if group is not None and last is not None and group.has_had(last) and group.whole:
            return replace(asked, workers=[worker.spec for worker in group.members], parts=0)
        raise _missing(asked.group)

    def added(self, client: Client, asked: AddRanks, group: Group) -> AddRanks:
        """Return the ranks to add to *group* with the workers of their parts, which the head forgets.

        An AddRanks that was carried out, but whose answer was lost, gets the workers that *group* has. Raises Refused
        if parts are missing.
        """
        if not asked.parts:
            return asked
        last = asked.workers[-1] if asked.workers else None
        workers = self._take(client, asked, last.id if last is not None else "")
        if workers is None and last is not None and last.id in group.workers:
            known = [one.spec for one in group.workers.values() if one.spec.rank >= group.world_size]
            if len({spec.rank for spec in known}) == last.rank + 1 - group.world_size:
                workers = sorted(known, key=lambda spec: spec.rank)
        if workers is None:
            raise _missing(asked.group)
        return replace(asked, workers=workers, parts=0)

    def _take(self, client: Client, asked: Launch | AddRanks, launch: str) -> list[WorkerSpec] | None:
        """Return all workers of *asked*, and forget its parts; None if the head does not have all parts."""
        parts = self._kept.get(client.incarnation, {}).get((asked.namespace, asked.group))
        if parts is None or (parts.launch, parts.count) != (launch, asked.parts):
            return None
        self.drop(client.incarnation, asked.namespace, asked.group)
        return [*parts.workers, *asked.workers]

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

    def _held(self, holder: str) -> str:
        counts: Counter[bytes] = Counter()
        for incarnation, launches in self._kept.items():
            client = self._head.clients.get(incarnation)
            count = sum(parts.count for parts in launches.values() if parts.holder == holder)
            if client is not None and count:
                counts[client.peer] = count
        return processes(self._head, counts)

    def __len__(self) -> int:
        return sum(map(len, self._kept.values()))


def _missing(group: str) -> Refused:
    return Refused("parts", f"the head does not have all parts of the launch of {group!r}: send them again")
