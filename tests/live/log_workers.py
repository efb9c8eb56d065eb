"""A worker with much output."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from rlinf_actors import Worker


class Talker(Worker):
    def say(self, lines: int) -> None:
        for n in range(lines):
            print(f"line {n}")
        print("to stderr", file=sys.stderr)
        subprocess.run([sys.executable, "-c", "print('from a child')"], check=True)
        print("長" * 50_000)

    def last_words(self) -> None:
        sys.stdout.write("last words")
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)
