"""WorkerDirectory: find the connection (Peer) to a worker or child member by its address.

Requests that come during a look-up wait for its result, in order. No thread blocks.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Awaitable, Callable
from typing import Union

from rlinf_actors.errors import (
    AuthenticationError,
    GroupNotFoundError,
    PeerDiedError,
    PlacementError,
    ProtocolMismatchError,
)
from rlinf_actors.messaging.addressing import check_rank
from rlinf_actors.model.address import WorkerAddress
from rlinf_actors.runtime import child_peers
from rlinf_actors.runtime.future import call_all
from rlinf_actors.runtime.peer import Peer
from rlinf_actors.runtime.remote_group import RemoteGroup
from rlinf_actors.runtime.runtime import Runtime

REMEMBERED = 64
"""Number of ended groups that a worker keeps, so that messages of an ended group can be received after the head forgot
the group.
"""

Found = Callable[[Union[RemoteGroup, Exception]], None]


class WorkerDirectory:
    """Finds the groups and workers with which one worker exchanges messages. Any thread may use it.

    A group that has ended is found too, as long as the head or this directory remembers the group. The peers of such a
    group have errors that say how they ended. An unknown name gives a GroupNotFoundError. *connect* is awaited on the
    loop; it returns the runtime once the runtime is in session with the head.

    Attributes:
        waiting: requests that wait for a look-up, by the name of the group. Only this class changes it.
    """

    def __init__(self, runtime: Runtime, connect: Callable[[], Awaitable[Runtime]]) -> None:
        self._runtime = runtime
        self._connect = connect
        self._lock = threading.Lock()
        self._groups: dict[str, RemoteGroup] = {}
        self.waiting: dict[str, list[Found]] = {}
        self.children = child_peers.ChildPeers(runtime)

    def peer(self, member: WorkerAddress, found: child_peers.Found) -> None:
        """Find a worker or child member by its address, and call *found* with its Peer or with an exception.

        If the worker's group is known and has not ended, *found* can be called at once on this thread; otherwise it is
        called later on the loop thread. Requests for workers of one group are answered in order. *found* must not
        raise.
        """

        def in_group(group: RemoteGroup | Exception) -> None:
            if isinstance(group, Exception):
                found(group)
                return
            rank = member.rank_path[0]
            if rank >= len(group.peers) and rank in group.membership.removed:
                found(group.membership.removed[rank])  # what it has sent can be received until it has ended
                return
            try:
                check_rank(member, len(group.peers))
            except PlacementError as error:
                found(error)
                return
            if len(member.rank_path) > 1:
                self.children.find(group, member, found)
            else:
                found(group.peers[rank])

        self.group(member.root_group_name, in_group)

    def group(self, name: str, found: Found) -> None:
        """Find a group by its name. Call *found* with the RemoteGroup, or with the exception if there is none.

        If the group is known and has not ended, *found* is called at once on this thread. Otherwise it is called later
        on the loop thread. Requests for the same name are answered in order. *found* must not raise.
        """
        with self._lock:
            waiting = self.waiting.get(name)
            group = self._groups.get(name)
            known = waiting is None and group is not None and _alive(group)
            if not known:
                if waiting is not None:
                    waiting.append(found)
                    return
                self.waiting[name] = [found]
        if known:
            assert group is not None
            found(group)
        else:
            self._runtime.io.start(self._find(name), f"finding group {name!r}")

    def known(self, name: str) -> RemoteGroup | None:
        """Return the group of that name if it is known, has not ended, and no request for it waits; else None."""
        with self._lock:
            group = self._groups.get(name)
            return group if group is not None and name not in self.waiting and _alive(group) else None

    async def _find(self, name: str) -> None:
        outcome: RemoteGroup | Exception
        try:
            runtime = await self._connect()
            outcome = await runtime.groups.find(runtime.namespace, name, ended=True)
        except GroupNotFoundError:
            outcome = self._forgotten(name)
        except Exception as error:  # noqa: BLE001 - it reaches every waiter
            outcome = error
        while True:
            with self._lock:
                if isinstance(outcome, RemoteGroup):
                    self._remember(name, outcome)
                waiting = self.waiting[name]
                if not waiting:
                    del self.waiting[name]
                    return
                self.waiting[name] = []
            call_all(waiting, outcome)

    def _remember(self, name: str, group: RemoteGroup) -> None:
        """Store *group* under its name. If too many ended groups are stored, drop the oldest.

        Call with the lock held.
        """
        self._groups.pop(name, None)
        self._groups[name] = group  # now the newest
        ended = [name for name, group in self._groups.items() if not _alive(group)]
        for old in ended[: max(0, len(ended) - REMEMBERED)]:
            del self._groups[old]

    def _forgotten(self, name: str) -> RemoteGroup | GroupNotFoundError:
        """Return the group that this directory has stored under a name that the head does not know any more.

        If none is stored, return a GroupNotFoundError to pass on.
        """
        with self._lock:
            before = self._groups.get(name)
        if before is not None:
            before.close(PeerDiedError(f"group {name!r}, which this worker knew, has ended", peer=name))
            return before
        return GroupNotFoundError(
            f"no group {name!r} is running in job {self._runtime.namespace!r}: launch it before a worker "
            f"sends to it or receives from it (launch() has reserved the name when it returns), and check the spelling"
        )


def _alive(group: RemoteGroup) -> bool:
    return not group.closing and not group.gone.done()


def peer_gone_error(peer: Peer, error: BaseException, what: str) -> Exception:
    """Return the exception for the operation *what*, which failed because of *error* of its *peer*.

    If *peer* is alive and refused this worker, this is a copy of *error*. Otherwise it is a PeerDiedError with
    *error*'s text. In both cases the text begins with *what*.
    """
    if isinstance(error, (AuthenticationError, ProtocolMismatchError)):
        return prefixed(error, what)  # the peer lives, and refused this worker
    if isinstance(error, PeerDiedError):
        died = PeerDiedError(f"{what}: {error}", peer=error.peer)
    else:
        died = PeerDiedError(f"{what}: {error}", peer=peer.name)
    died.__cause__ = error
    return died


def prefixed(error: Exception, what: str) -> Exception:
    """Return a copy of *error* whose text begins with the operation *what*.

    Each operation needs its own exception object, because an exception keeps the traceback of the code that raises it.
    """
    same = copy.copy(error)
    same.args = (f"{what}: {error}",)
    same.__cause__ = error.__cause__
    return same
