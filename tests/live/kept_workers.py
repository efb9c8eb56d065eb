"""Workers that go on while their agentd is away."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

from rlinf_actors import Worker


class Kept(Worker):
    """Counts its calls, so that a second one of its rank would show."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def pids(self) -> tuple[int, int]:
        """Of this process and its template."""
        return os.getpid(), os.getppid()

    def count(self) -> int:
        self.calls += 1
        return self.calls

    def wait_for(self, fifo: str) -> str:
        """Returns what somebody writes there."""
        with open(fifo) as file:
            return file.read()

    def leave(self, code: int, text: str) -> None:
        """Ends by itself a moment later, so that the call is answered."""

        def end() -> None:
            print(text, file=sys.stderr, flush=True)
            os._exit(code)

        threading.Timer(0.05, end).start()

    def say(self, text: str) -> None:
        print(text, flush=True)

    def child(self) -> int:
        sleeper = [sys.executable, "-S", "-c", "import time; time.sleep(1000)"]
        return subprocess.Popen(sleeper, start_new_session=True).pid

    def hold_devices(self) -> None:
        self.device_lock.acquire()

    def release_devices(self) -> None:
        self.device_lock.release()

    def locked_turn(self) -> int:
        with self.device_lock:
            self.calls += 1
            return self.calls

    def turns(self) -> int:
        return self.calls
