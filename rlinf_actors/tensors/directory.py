"""Groups by name, looked up once; what is asked meanwhile waits in order, and no thread does."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from typing import Union

from rlinf_actors.errors import (
    AuthenticationError,
    GroupNotFoundError,
    PeerDiedError,
    ProtocolMismatchError,
    RlinfActorsError,
)
from rlinf_actors.runtime.peer import Peer
from rlinf_actors.runtime.process import Runtime
from rlinf_actors.runtime.remote import RemoteGroup

Found = Callable[[Union[RemoteGroup, Exception]], None]


class Directory:
    """Any thread.

    Args:
        runtime: of this worker.
        connect: waits until the runtime is in session with the head; runs on the loop.
    """

    def __init__(self, runtime: Runtime, connect: Callable[[], Awaitable[Runtime]]) -> None:
        self._runtime = runtime
        self._connect = connect
        self._lock = threading.Lock()
        self._groups: dict[str, RemoteGroup] = {}
        self._waiting: dict[str, list[Found]] = {}

    def group(self, name: str, found: Found) -> None:
        """Call *found* with the group, or with what went wrong: at once if it is known, else on the loop's thread.

        What is asked for one name is answered in the order asked. *found* must not raise.
        """
        with self._lock:
            waiting = self._waiting.get(name)
            group = self._groups.get(name)
            known = waiting is None and group is not None and _alive(group)
            if not known:
                if waiting is not None:
                    waiting.append(found)
                    return
                self._waiting[name] = [found]
        if known:
            assert group is not None
            found(group)
        else:
            self._runtime.io.submit(self._find(name))

    async def _find(self, name: str) -> None:
        outcome: RemoteGroup | Exception
        try:
            runtime = await self._connect()
            outcome = await runtime.find(runtime.namespace, name)
        except GroupNotFoundError:
            outcome = self._missing(name)
        except Exception as error:  # noqa: BLE001 - whatever it is, it reaches those who wait
            outcome = error
        while True:
            with self._lock:
                if isinstance(outcome, RemoteGroup):
                    self._groups[name] = outcome
                waiting = self._waiting[name]
                if not waiting:
                    del self._waiting[name]
                    return
                self._waiting[name] = []
            for found in waiting:
                found(outcome)

    def _missing(self, name: str) -> RlinfActorsError:
        before = self._groups.get(name)
        if before is not None:
            first = next((peer for peer in before.peers if peer.error is not None), None)
            if first is None:
                return PeerDiedError(f"group {name!r}, which this worker talked to, has ended", peer=name)
            return PeerDiedError(f"group {name!r} has ended: {first.error}", peer=first.name)
        return GroupNotFoundError(
            f"no group {name!r} is running in namespace {self._runtime.namespace!r}: launch it before a worker "
            f"sends to it or receives from it (launch() has reserved the name when it returns), and check the spelling"
        )


def _alive(group: RemoteGroup) -> bool:
    return not group.closing and not group.gone.done()


def gone(peer: Peer, error: BaseException, what: str) -> Exception:
    """The error of an operation whose other end is gone. A new one for each: tracebacks are kept in them."""
    if isinstance(error, (AuthenticationError, ProtocolMismatchError)):
        return error  # it lives, and refused us
    if isinstance(error, PeerDiedError):
        died = PeerDiedError(f"{what}: {error}", peer=error.peer)
    else:
        died = PeerDiedError(f"{what}: {error}", peer=peer.name)
    died.__cause__ = error
    return died
