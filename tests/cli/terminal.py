"""A command of rlinf-actors in a terminal: what it shows, and what a person types."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator


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
def terminal(*arguments: str) -> Iterator[Terminal]:
    """Run `rlinf-actors ARGUMENTS` in a terminal of 200 columns, in a session of its own."""
    ours, theirs = os.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "200"}
    command = [sys.executable, "-m", "rlinf_actors.cli.main", *arguments]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True) as run:
        os.close(theirs)
        try:
            yield Terminal(run, ours)
        finally:
            run.kill()
            os.close(ours)
