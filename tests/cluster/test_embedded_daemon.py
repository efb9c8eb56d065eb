"""How the private daemon is ended: asked, else SIGTERM; the daemon here is a stand-in."""

from __future__ import annotations

import asyncio
import errno
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlinf_actors.cluster import local_daemon
from rlinf_actors.errors import ClusterTimeoutError, RlinfActorsError

SAYS_READY = 'import os, sys, signal; os.write(int(sys.argv[1]), b\'{"head": "ipc://x"}\\n\'); signal.pause()'
SAYS_NOTHING = "import signal; signal.pause()"


@pytest.fixture
def daemon(monkeypatch, rlinf_leak_check):
    """`daemon(source)` is one whose process runs *source*."""

    def make(source):
        def spawn(arguments, run_dir, tell, env):
            made.process = subprocess.Popen([sys.executable, "-c", source, str(tell)], pass_fds=(tell,))
            return made.process

        monkeypatch.setattr(local_daemon, "start_agentd", spawn)
        made = local_daemon.EmbeddedDaemon(lambda reason: made.deaths.append(reason))
        made.deaths = []
        return made

    return make


async def started(made):
    assert await made.start(None) == "ipc://x"
    return made


async def test_one_that_cannot_be_asked_gets_sigterm(daemon):
    made = await started(daemon(SAYS_READY))
    await made.stop(None, 10.0)
    await made.stop()
    assert made.process.returncode == -signal.SIGTERM
    assert made.deaths == []


async def test_one_that_does_not_answer_gets_sigterm(daemon):
    made = await started(daemon(SAYS_READY))

    async def ask():
        raise RlinfActorsError("no answer")

    await made.stop(ask)
    assert made.process.returncode == -signal.SIGTERM


async def test_one_that_agreed_does_not(daemon):
    made = await started(daemon(SAYS_READY))

    async def ask():
        # ends it in its own way: by the kernel, since a handler of Python's may be called only after pause()
        made.process.send_signal(signal.SIGUSR1)

    await made.stop(ask)
    assert made.process.returncode == -signal.SIGUSR1


async def test_a_cancelled_start_ends_it_by_sigterm(daemon):
    made = daemon(SAYS_NOTHING)
    starting = asyncio.ensure_future(made.start(None))
    await asyncio.sleep(0)
    assert made.process.poll() is None
    starting.cancel()
    await asyncio.wait([starting])
    assert starting.cancelled()
    assert made.process.returncode == -signal.SIGTERM


async def test_a_start_that_takes_too_long_ends_it(daemon):
    made = daemon(SAYS_NOTHING)
    with pytest.raises(ClusterTimeoutError, match="did not come up in"):
        await made.start(0.05)
    assert made.process.returncode == -signal.SIGTERM


@pytest.mark.parametrize(
    ("where", "name", "error", "end"),
    [
        (local_daemon, "make_decoders", NameError("in the driver"), signal.SIGTERM),
        (local_daemon.os, "pidfd_open", OSError(errno.EMFILE, "no descriptor is left"), signal.SIGKILL),
    ],
)
async def test_an_error_of_the_driver_during_the_start_ends_it_at_once(daemon, monkeypatch, where, name, error, end):
    def fail(*_):
        raise error

    made = daemon(SAYS_NOTHING)
    with monkeypatch.context() as patch:
        patch.setattr(where, name, fail)
        with pytest.raises(type(error)) as raised:
            await made.start(None)
    assert raised.value is error
    assert made.process.returncode == -end
    assert not Path(made.run_dir).exists()  # noqa: ASYNC240


async def test_a_death_says_what_to_do(daemon):
    made = await started(daemon(SAYS_READY))
    told = asyncio.Event()
    made._on_death = lambda reason: (made.deaths.append(reason), told.set())
    made.process.kill()
    await asyncio.wait_for(told.wait(), 10)
    assert "ended with -9; call shutdown() on this Cluster and make a new one" in made.deaths[0]

    async def ask():
        raise AssertionError("there is nobody to ask")

    await made.stop(ask)


@pytest.mark.slow
def test_an_agentd_py_of_the_working_directory_is_not_taken_for_agentd(tmp_path):
    (tmp_path / "agentd.py").write_text("raise SystemExit('wrong agentd')\n")
    start = local_daemon.boot(local_daemon.AGENTD)
    ran = subprocess.run(
        [sys.executable, *start, "--help"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
    )
    assert (ran.returncode, ran.stderr) == (0, "")
