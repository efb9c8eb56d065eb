"""The private cluster of a driver without a head: one agentd process with the head inside.

The agentd listens on unix sockets in a directory of mode 0700, watches the driver by a pidfd and a pipe, and ends when
the driver ends, however the driver ends. If the agentd itself is killed, the driver kills what is left of its cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import rlinf_actors
from rlinf_actors import procfs
from rlinf_actors.cluster.service import modules_to_preload
from rlinf_actors.errors import ClusterTimeoutError, RlinfActorsError
from rlinf_actors.exhaustion import explain
from rlinf_actors.kept_logs import keep
from rlinf_actors.net.head_records import clear_stale
from rlinf_actors.net.host import pid_start
from rlinf_actors.net.loop import Tasks
from rlinf_actors.runtime.progress import Facts, showing
from rlinf_actors.settings import CLUSTER_MARK, Settings
from rlinf_actors.wire.protocol import make_decoders
from rlinf_actors.wire.template_protocol import ROBOT_GONE_S

PATIENCE_S = 3.0
"""Seconds that a killed process may take to end, because it may be in an uninterruptible system call."""


def processes_with(name: str, value: str) -> list[int]:
    """Return the pids of all other living processes whose environment has the variable *name* with this value."""
    wanted, found = f"{name}={value}".encode(), []
    for pid in procfs.pids():
        with contextlib.suppress(OSError):
            if pid != os.getpid() and wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                state = procfs.stat(pid)
                if state is not None and not state.ended:
                    found.append(pid)
    return found


def end_all(run_dir: str) -> None:
    """Kill all processes that a killed agentd has left, and wait for their ends. Blocks for at most PATIENCE_S.

    This function kills the processes whose environment names *run_dir*, the run directory of the agentd. The keeper of
    the cluster kills the other ones, and ends after that; this function waits for the end of the keeper too.
    """
    deadline = time.monotonic() + PATIENCE_S
    while (left := processes_with(CLUSTER_MARK, run_dir)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                pidfd = procfs.pidfd_of(pid)
                try:
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                    procfs.has_ended(pidfd, max(0.0, deadline - time.monotonic()))
                finally:
                    os.close(pidfd)
    _wait_for_keeper(run_dir, deadline)


def _wait_for_keeper(run_dir: str, deadline: float) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as keeper:
        try:
            keeper.connect(f"{run_dir}/keeper")
            keeper.send(b'{"do": "wait"}')
        except OSError:  # it has ended
            return
        keeper.settimeout(max(0.01, deadline - time.monotonic()))
        with contextlib.suppress(OSError):
            keeper.recv(1)  # the keeper sends nothing; the socket closes when it ends


log = logging.getLogger(__name__)

START_TIMEOUT_S = 30.0
_MAX_RUN_DIR = 60
"""Longest parent of the run directory, in bytes: a unix socket's path has at most 107 bytes, our names take up to 40.
"""
_BOOT = (  # without the working directory: an agentd.py of the user's stands in for nothing
    "import sys; sys.path[:] = [*filter(None, sys.path), {root!r}]; {statements}"
)
AGENTD = "import gc; gc.disable(); from agentd.command_line import run; run()  # agentd"
RLINF_ACTORS = "from rlinf_actors.cli.main import main; sys.exit(main())  # rlinf-actors"
"""Statements that run agentd, and `rlinf-actors`. Their comment names the process (`head_records.script_in`)."""


class EmbeddedDaemon:
    """Starts, watches and stops the agentd of a driver's private cluster. All methods run on the loop thread."""

    def __init__(self, on_death: Callable[[str], None]) -> None:
        self.run_dir = ""
        self.endpoint = ""
        self._on_death = on_death
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._ended = asyncio.Event()
        self._stopping = False
        self._tasks = Tasks()
        self._clearing: asyncio.Task[None] | None = None

    async def start(self, timeout: float | None) -> str:
        """Start the agentd with a head inside, wait until its node has registered, and return the head's endpoint.

        *timeout* is the maximum of seconds to wait, None for START_TIMEOUT_S. Loop thread.

        Raises:
            ClusterTimeoutError: the agentd was not ready in time.
            RlinfActorsError: the agentd failed; the message has the last lines of its log.
        """
        base = Settings.load().run_dir or tempfile.gettempdir()
        self.run_dir = tempfile.mkdtemp(prefix="rlinf-", dir=base if len(os.fsencode(base)) <= _MAX_RUN_DIR else "/tmp")
        ready, tell = os.pipe()
        try:
            env = {**os.environ, CLUSTER_MARK: self.run_dir}
            options = ["--head", "--embedded", "--prestart", ",".join(modules_to_preload())]
            self._process = start_agentd(options, self.run_dir, tell, env)
            self._pidfd = os.pidfd_open(self._process.pid)
            asyncio.get_running_loop().add_reader(self._pidfd, self._died)
            os.close(tell)
            tell = -1
            make_decoders()  # here, because agentd needs longer to start
            async with showing(self._start_facts):
                line = await asyncio.wait_for(_read_line(ready), timeout or START_TIMEOUT_S)
        except asyncio.TimeoutError:
            await self.stop()
            raise ClusterTimeoutError(
                f"the private agentd did not come up in {timeout or START_TIMEOUT_S:g} s{self._log_tail()}"
            ) from None
        except BaseException:
            await self.stop()
            raise
        finally:
            os.close(ready)
            if tell >= 0:
                os.close(tell)
        answer = json.loads(line) if line else {"error": "it ended before it was ready"}
        if "error" in answer:
            tail = self._log_tail()
            await self.stop()
            raise RlinfActorsError(f"the private agentd did not start: {answer['error']}{tail}")
        self.endpoint = str(answer["head"])
        return self.endpoint

    async def stop(
        self,
        ask: Callable[[], Awaitable[object]] | None = None,
        timeout: float = 10.0,
        failed: Callable[[], str] = lambda: "it did not start",
    ) -> str:
        """Stop the agentd, wait for its end, and remove its run directory. May be called twice. Loop thread.

        Args:
            ask: asks the agentd to end. If it is None or raises an RlinfActorsError, the agentd gets SIGTERM.
            timeout: seconds after which the agentd gets SIGKILL.
            failed: called after the agentd has ended; returns why the logs are kept, "" to remove them.

        Returns:
            The directory in which the logs are kept, "" if they were removed.
        """
        async with showing(self._end_facts):
            return await self._stop(ask, timeout, failed)

    async def _start_facts(self, _missing: bool) -> Facts:
        last = self._log_lines(1)
        return Facts(
            "starting the private cluster", f"its log says last: {last[0]}" if last else "it has logged nothing"
        )

    async def _end_facts(self, _missing: bool) -> Facts:
        return Facts("waiting for the end of the private cluster")

    async def _stop(
        self, ask: Callable[[], Awaitable[object]] | None, timeout: float, failed: Callable[[], str]
    ) -> str:
        self._stopping = True
        process = self._process
        if process is not None and self._pidfd < 0:  # the system had no descriptor to watch it by
            process.kill()
        elif process is not None and not self._ended.is_set():
            acknowledged = False
            if ask is not None:
                with contextlib.suppress(RlinfActorsError):  # it ended before it answered, or does not answer
                    await ask()
                    acknowledged = True
            if not acknowledged:
                process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(self._ended.wait(), timeout)
            except asyncio.TimeoutError:
                process.kill()
                await self._ended.wait()
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        if self._clearing is not None:
            await asyncio.wait([self._clearing])  # its failure is in the log
        if process is not None:
            with process:  # waits for it, and closes the pipe to it
                self._process = None
        kept = self._keep_logs(why) if process is not None and (why := failed()) else ""
        if self.run_dir:
            shutil.rmtree(self.run_dir, ignore_errors=True)
            clear_stale(Settings.load())  # the record of an agentd that was killed
        return kept

    def _keep_logs(self, why: str) -> str:
        parent = Settings.load().kept_logs
        if parent is None:
            return ""
        try:
            return keep(self.run_dir, parent, why)
        except OSError as error:
            log.warning("the logs of the private cluster are removed, for they cannot be kept in %s: %s", parent, error)
            return ""

    def _died(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        self._ended.set()
        if not self._stopping and self._process is not None:
            code = self._process.wait()
            self._clearing = self._tasks.start(self._clear(), "ending what the private agentd left")
            self._on_death(
                f"its daemon (agentd, pid {self._process.pid}) ended with {code}; "
                f"call shutdown() on this Cluster and make a new one{self._log_tail()}"
            )

    async def _clear(self) -> None:
        """Kill the processes that a killed agentd has left, after robot workers had time to make their robots safe."""
        # templates end their workers, but a template may have been killed too
        await asyncio.sleep(ROBOT_GONE_S)  # the time in which robot workers make their robots safe
        end_all(self.run_dir)  # blocks the loop: at the interpreter's exit there may be no thread pool

    def _log_lines(self, number: int) -> list[str]:
        try:
            return Path(self.run_dir, "agentd.log").read_text(errors="replace").splitlines()[-number:]
        except OSError:
            return []

    def _log_tail(self) -> str:
        lines = self._log_lines(20)
        return "\nlast lines of its log:\n" + "\n".join(f"    {line}" for line in lines) if lines else ""


def boot(statements: str) -> list[str]:
    """Return the options by which Python runs *statements* with this project's code. Options of theirs follow."""
    root = str(Path(rlinf_actors.__file__).resolve().parent.parent)
    return ["-c", _BOOT.format(root=root, statements=statements)]


def start_agentd(arguments: Sequence[str], run_dir: str, tell: int, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start an agentd that ends when this process ends, or runs another program (os.exec), which closes the pipe to the
    agentd's stdin. Return the agentd, whose log is agentd.log in *run_dir*. The caller closes the pipe.

    Args:
        arguments: further options on agentd's command line, such as ``--head``.
        run_dir: run directory of the agentd; it must exist.
        tell: the write end of a pipe, to which the agentd writes when its node has registered with the head.
        env: environment variables of the agentd.
    """
    command = [
        sys.executable, *boot(AGENTD), *arguments,
        "--owner-pid", str(os.getpid()), "--owner-start", str(pid_start(os.getpid())),
        "--run-dir", run_dir, "--ready-fd", str(tell),
    ]  # fmt: skip
    with open(os.path.join(run_dir, "agentd.log"), "ab") as log:
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=(tell,),
                start_new_session=True,
                env=env,
            )
        except BlockingIOError as error:
            raise BlockingIOError(error.errno, f"the private agentd cannot be started: {explain(error)}") from None


async def _read_line(fd: int) -> bytes:
    loop = asyncio.get_running_loop()  # no connect_read_pipe(): uvloop closes the descriptor twice
    done: asyncio.Future[bytes] = loop.create_future()
    os.set_blocking(fd, False)
    data = bytearray()

    def readable() -> None:
        try:
            chunk = os.read(fd, 65536)
        except BlockingIOError:
            return
        data.extend(chunk)
        if (not chunk or b"\n" in chunk) and not done.done():
            done.set_result(bytes(data))

    loop.add_reader(fd, readable)
    try:
        return await done
    finally:
        loop.remove_reader(fd)
