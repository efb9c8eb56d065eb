"""Workers that run under a profiler."""

from __future__ import annotations

import os
import signal
import sys
import threading

from rlinf_actors import Worker


class Profiled(Worker):
    def pids(self) -> tuple[int, int]:
        print("said to stdout", flush=True)
        print("said to stderr", file=sys.stderr, flush=True)
        return os.getpid(), os.getppid()

    def never(self) -> None:
        threading.Event().wait()

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def leave(self, code: int) -> None:
        os._exit(code)

    def compute(self, step: int) -> int:
        import torch

        self.start_profile(step)
        total = int(torch.ones(10).sum())
        self.stop_profile()
        return total
