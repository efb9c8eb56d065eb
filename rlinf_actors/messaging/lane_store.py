"""The store of a lane over gloo: keys travel by the link between the two workers, and nothing listens for them.

gloo's two members tell each other the addresses of their sockets by a store. torch's TCPStore answers any peer that
reaches its port. Here each end keeps the keys of both ends, and sends its own to the other as LaneKey frames, by the
link that authenticates the workers.

torch calls the store while it makes the process group, on the lane's thread, and never again. NCCL calls its store
later, on threads that must not wait for the interpreter's lock: its lanes use process_groups.GroupStore.
"""

from __future__ import annotations

import datetime
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

BY_LINK = "0"
"""Port in the store's address of a lane whose keys travel by the link."""


class LaneStore:
    """One end of a lane's store. Any thread.

    Args:
        send: sends a key and its value to the other end.
        begins: True at the receiver, which sends its keys at once. The sender waits for the first key of the receiver,
            since the receiver may not know the lane before.
        timeout_s: most seconds that `get` and `wait` wait for a key.
    """

    def __init__(self, send: Callable[[str, bytes], object], timeout_s: float, *, begins: bool = False) -> None:
        self._send = send
        self._ready = begins
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._own: dict[str, bytes] = {}
        self._values: dict[str, bytes] = {}
        self._closed = False

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._own[key] = self._values[key] = value
            self._changed.notify_all()
            ready = self._ready
        if ready:
            self._send(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        """Wait until both ends together have set *keys*.

        Raises:
            RuntimeError: the time is up, or the lane has ended.
        """
        seconds = self._timeout_s if timeout is None else timeout.total_seconds()
        with self._changed:
            self._changed.wait_for(lambda: self._closed or all(key in self._values for key in keys), seconds)
            if self._closed:
                raise RuntimeError("the lane has ended")
            if any(key not in self._values for key in keys):
                raise RuntimeError("the making of the lane timed out: the other end did not begin")

    def arrived(self, key: str, value: bytes) -> None:
        """Take a key that the other end has set; answer the first one with the keys of this end."""
        with self._changed:
            owed = {} if self._ready else dict(self._own)
            self._ready = True
            self._values[key] = value
            self._changed.notify_all()
        for name, ours in owed.items():
            self._send(name, ours)

    def close(self) -> None:
        """End the waits for keys. May be called again."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def for_torch(self) -> Any:
        """Return this store as a torch.distributed.Store. Loads torch. The caller keeps it while torch may call it."""
        return _torch_class()(self)


@functools.cache
def _torch_class() -> Any:
    """Return the class of stores that C++ code of torch may call. gloo calls `set`, `wait` and `get` only."""
    import torch.distributed

    base: Any = vars(torch.distributed)["Store"]

    class TorchStore(base):  # type: ignore[misc]
        def __init__(self, kept: LaneStore) -> None:
            super().__init__()
            self.set, self.get, self.wait = kept.set, kept.get, kept.wait

    return TorchStore
