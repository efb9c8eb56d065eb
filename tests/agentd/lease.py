"""A file whose execution is held up by a lease (fcntl F_SETLEASE), as its owner can do."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

_HOLDS = """
import fcntl, os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGIO])
if len(sys.argv) > 2:
    os.setuid(int(sys.argv[2]))
file = open(sys.argv[1], "rb")
fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
print("held", flush=True)
signal.sigwait([signal.SIGIO])
print("asked", flush=True)
sys.stdin.read()
"""


class Lease:
    """*asked* waits until a process tries to open or execute the file."""

    def __init__(self, asked: Callable[[], object]) -> None:
        self.asked = asked


@contextlib.contextmanager
def leased(path: str | os.PathLike[str], uid: int | None = None) -> Iterator[Lease]:
    """Hold a lease on the file *path*, as user *uid* if given, until the ``with`` block ends: whoever opens or executes
    it waits, 45 s at most.
    """
    command = [sys.executable, "-c", _HOLDS, str(path), *([str(uid)] if uid is not None else [])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        try:
            yield Lease(holder.stdout.readline)
        finally:
            holder.kill()
