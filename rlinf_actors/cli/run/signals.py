"""Signals of `rlinf-actors run` as events of its selector, with their senders (signalfd(2), which Python lacks).

Between `__enter__` and `__exit__` the signals are blocked in this process, so no code is interrupted; children need
`unblock`. The kernel sends Ctrl-C to every process of the terminal's foreground group, so the program has it already;
every other signal is for the program: one from a process, and the SIGHUP that only a session's leader gets.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import struct

_libc = ctypes.CDLL(None, use_errno=True)
_CLOEXEC = 0o2000000
_SIGINFO_BYTES = 128

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_TYPED = (signal.SIGINT, signal.SIGQUIT)
FORWARDED = (*ENDING, signal.SIGUSR1, signal.SIGUSR2)


class Signals:
    """The signals of FORWARDED for this process, which has one thread. Use it in a ``with`` block."""

    def __enter__(self) -> Signals:
        mask = (ctypes.c_uint64 * 16)(sum(1 << (number - 1) for number in FORWARDED))
        self._before = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
        self._fd: int = _libc.signalfd(-1, ctypes.byref(mask), _CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "signalfd: no descriptor for signals")
        return self

    def __exit__(self, *_error: object) -> None:
        self.forget()  # else they would arrive now, and end this process with another exit code than the program's
        os.close(self._fd)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._before)

    def fileno(self) -> int:
        return self._fd

    def next(self) -> tuple[int, bool]:
        """Return the next signal, and True if it was typed at the terminal. Blocks until there is one."""
        number, _errno, code = struct.unpack_from("=Iii", os.read(self._fd, _SIGINFO_BYTES))
        return number, number in _TYPED and code > 0  # the kernel has sent it

    def forget(self) -> None:
        """Drop the signals that have arrived."""
        while select.select([self._fd], [], [], 0)[0]:
            self.next()

    def unblock(self) -> None:
        """Give this process the signal mask of before. For the child between fork and exec."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self._before)
