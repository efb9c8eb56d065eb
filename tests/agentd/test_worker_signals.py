"""agentd's handling of one worker, without a template."""

import asyncio
import os

from agentd.worker_process import WorkerProcess
from rlinf_actors import procfs


async def test_signal_to_a_worker_that_just_ended_is_no_error(sleeper, monkeypatch):
    has_ended = procfs.has_ended

    def and_then_it_does(pidfd, *args):
        before = has_ended(pidfd, *args)
        sleeper.kill()
        sleeper.wait()  # reaped, as by its template
        return before

    monkeypatch.setattr(procfs, "has_ended", and_then_it_does)
    worker = WorkerProcess(None, None, None, pid=sleeper.pid, pidfd=os.pidfd_open(sleeper.pid))
    worker._terminate()
    worker.release(asyncio.get_running_loop())
