"""Two hosts on one machine: two network namespaces joined by a cable. This process moves into one of them.

The two hosts share no unix sockets and no shared memory, so their processes communicate over TCP. Needs root, ``ip``,
``unshare`` and ``nsenter``.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Sequence

HERE, OTHER = "10.213.9.1", "10.213.9.2"
_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


class TwoHosts:
    """Context manager of the two hosts. Enter it before any thread uses the network.

    Attributes:
        here, other: addresses of the hosts.
    """

    here, other = HERE, OTHER

    def __enter__(self) -> TwoHosts:
        self._before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        _check(_libc.unshare(_CLONE_NEWNET), "a network namespace for this benchmark (it needs root)")
        self._holder = subprocess.Popen(
            ["unshare", "-n", "sh", "-c", "echo up; exec cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != b"up\n":  # it is in its namespace when it has said so
            raise OSError("unshare -n did not start")
        _ip("link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", str(self._holder.pid))
        for prefix, address in (((), HERE), (self.prefix, OTHER)):
            for command in (
                ("addr", "add", f"{address}/24", "dev", "eth0"),
                ("link", "set", "eth0", "up"),
                ("link", "set", "lo", "up"),
            ):
                _ip(*command, prefix=prefix)
        return self

    def __exit__(self, *_error: object) -> None:
        self._holder.communicate()  # its stdin ends, and with it the last process of that host; the cable goes too
        _check(_libc.setns(self._before, _CLONE_NEWNET), "the network namespace from before")
        os.close(self._before)

    @property
    def prefix(self) -> Sequence[str]:
        """Return the prefix of a command that runs on the other host."""
        return ("nsenter", f"--net=/proc/{self._holder.pid}/ns/net")

    def move_to_other(self) -> None:
        """Move this thread to the other host."""
        fd = os.open(f"/proc/{self._holder.pid}/ns/net", os.O_RDONLY)
        _check(_libc.setns(fd, _CLONE_NEWNET), "the other network namespace")
        os.close(fd)


def _ip(*arguments: str, prefix: Sequence[str] = ()) -> None:
    subprocess.run([*prefix, "ip", *arguments], check=True)


def _check(result: int, what: str) -> None:
    if result:
        error = ctypes.get_errno()
        raise OSError(error, f"cannot enter {what}: {os.strerror(error)}")
