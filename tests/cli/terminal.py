"""A command of rlinf-actors in a terminal: what it shows, and what a person types."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator, Sequence
from typing import Any

COMMAND = (sys.executable, "-m", "rlinf_actors.cli.main")


class Terminal:
    def __init__(self, process: subprocess.Popen[bytes], ours: int) -> None:
        self.process = process
        self.shown = ""
        self._ours = ours

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def until(self, text: str) -> str:
        """Read until *text* is shown after what was read before. Return what was shown until then."""
        at = len(self.shown)
        while text not in self.shown[at:]:
            read = self._read()
            assert read, f"the command ended without {text!r}: {self.shown}"
        return self.shown[at:]

    def resize(self, columns: int, rows: int) -> None:
        """Give the terminal a size. The kernel tells the command by SIGWINCH."""
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def attributes(self) -> list[Any]:
        """Return the modes of the terminal, which a command that reads keys changes."""
        return termios.tcgetattr(self._ours)

    def end(self) -> int:
        """Read to the end of the command. Return its exit code."""
        while self._read():
            pass
        return self.process.wait()

    def _read(self) -> bool:
        try:
            read = os.read(self._ours, 65536)
        except OSError:  # EIO: the command has ended, and nobody has the other end
            return False
        self.shown += read.decode(errors="replace").replace("\r\n", "\n")
        return bool(read)


@contextlib.contextmanager
def terminal(*arguments: str, command: Sequence[str] = COMMAND) -> Iterator[Terminal]:
    """Run `rlinf-actors ARGUMENTS`, or another *command*, in a terminal of 200 columns, which controls its session."""
    ours, theirs = os.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "200"}
    with subprocess.Popen(
        [*command, *arguments], stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # else no key makes a signal
    ) as run:  # fmt: skip
        os.close(theirs)
        try:
            yield Terminal(run, ours)
        finally:
            run.kill()
            os.close(ours)
