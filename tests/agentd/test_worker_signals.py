"""agentd's handling of one worker, without a template."""

import asyncio
import os

from agentd.launch_plan import Rules, Site
from agentd.worker_process import WorkerProcess
from rlinf_actors import procfs
from rlinf_actors.wire.values import WorkerSpec


async def test_signal_to_a_worker_that_just_ended_is_no_error(sleeper, monkeypatch, tmp_path):
    has_ended = procfs.has_ended

    def and_then_it_does(pidfd, *args):
        before = has_ended(pidfd, *args)
        sleeper.kill()
        sleeper.wait()  # reaped, as by its template
        return before

    monkeypatch.setattr(procfs, "has_ended", and_then_it_does)
    spec, site = WorkerSpec("w", "g", "ns", 0, 1, 0, {}), Site(Rules("n0", ""), tmp_path, None, dict)
    worker = WorkerProcess(spec, None, None, site, pid=sleeper.pid, pidfd=os.pidfd_open(sleeper.pid))
    worker._terminate()
    worker.release(asyncio.get_running_loop())
