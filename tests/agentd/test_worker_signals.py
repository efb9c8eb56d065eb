"""agentd's handling of one worker, without a template."""

import asyncio
import os
from types import SimpleNamespace

import pytest

from agentd.launch_plan import Rules, Site
from agentd.worker_process import WorkerProcess
from rlinf_actors import procfs
from rlinf_actors.template.wrapped_start import exit_report
from rlinf_actors.wire.endings import LEFT
from rlinf_actors.wire.values import Claim, WorkerSpec


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


@pytest.mark.parametrize(("reason", "claims"), [("", []), ("", [Claim("k", "t")]), ("its owner ended", [])])
def test_report_of_a_stopped_worker_still_says_that_a_process_was_left(tmp_path, reason, claims):
    spec, site = WorkerSpec("w", "g", "ns", 0, 1, 0, {}, claims=claims), Site(Rules("n0", ""), tmp_path, None, dict)
    worker = WorkerProcess(spec, None, None, site, stopping=True, reason=reason)
    output = SimpleNamespace(fault="", tail=SimpleNamespace(lines=list))
    status = SimpleNamespace(si_status=0, si_code=os.CLD_EXITED)
    ended = SimpleNamespace(
        status=status, fork=SimpleNamespace(wrapper=()), failure="", up=True, out=output, err=output
    )
    worker.template = SimpleNamespace(gone=True, last_words=str)
    for left in (True, False):
        for exit in (exit_report(ended, "no", left), worker.ended_with_template(0, left)):
            assert (LEFT in worker.why(exit).get("reason", exit.reason)) == left
            assert reason in worker.why(exit)["reason"]
