"""The I/O thread, ports, and the identity of the machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading

import pytest

from rlinf_actors.errors import ConfigError, UsageError
from rlinf_actors.net.host import free_port, host_key, pid_start, route_ip, split_address
from rlinf_actors.net.link import LinkOptions
from rlinf_actors.net.local_network import LocalNetwork
from rlinf_actors.net.loop import IoThread, call_threadsafe
from rlinf_actors.net.socket_security import Security
from rlinf_actors.net.zmq_network import ZmqNetwork
from rlinf_actors.net.zmq_socket import SLICE


class TestIoThread:
    def test_runs_coroutines_and_functions_on_its_thread(self, rlinf_leak_check):
        io = IoThread("io-under-test")
        seen = threading.Event()

        async def where():
            return threading.current_thread().name, io.inside()

        assert io.submit(where()).result(10) == ("io-under-test", True)
        io.call(seen.set)
        assert seen.wait(10)
        assert not io.inside()
        io.stop()
        io.stop()
        io.call(seen.clear)
        assert seen.is_set()

    def test_stop_cancels_running_coroutines(self, rlinf_leak_check):
        io = IoThread("io")
        started, ended = threading.Event(), threading.Event()

        async def forever():
            started.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        future = io.submit(forever())
        assert started.wait(10)
        io.stop()
        assert ended.is_set()
        assert future.cancelled()

    def test_submit_during_stop_is_refused_at_once(self, rlinf_leak_check):
        io = IoThread("io")
        busy, go_on, asked = threading.Event(), threading.Event(), threading.Event()

        class Thread:
            def __init__(self, thread):
                self._thread = thread

            def join(self):
                asked.set()
                self._thread.join()

        async def forever():
            await asyncio.Event().wait()

        io.call(lambda: (busy.set(), go_on.wait(10)))
        assert busy.wait(10)
        io._thread = Thread(io._thread)
        stopping = threading.Thread(target=io.stop)
        stopping.start()
        assert asked.wait(10)
        with pytest.raises(UsageError, match="was shut down"):
            io.submit(forever())
        go_on.set()
        stopping.join()


class TestPorts:
    def test_a_free_port_can_be_bound(self):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", free_port()))

    def test_free_port_is_below_the_limit(self):
        assert 1023 < free_port(20_000) < 20_000
        with pytest.raises(OSError, match="below 1024"):
            free_port(1024)


def test_host_key_is_the_same_in_another_process_of_this_machine():
    code = "from rlinf_actors.net.host import host_key; print(host_key())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == host_key()


def test_pid_start_names_a_process_for_good():
    assert pid_start(os.getpid()) == pid_start(os.getpid()) > 0
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    assert pid_start(child.pid) == 0


def test_route_ip_of_loopback_is_loopback():
    assert route_ip("127.0.0.1") == "127.0.0.1"
    assert route_ip("localhost") == "127.0.0.1"


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_event_loop_starts_with_closed_standard_descriptors(closed):
    """libuv aborts if one of its sockets has the number of a standard descriptor."""
    source = "from rlinf_actors.net.loop import new_event_loop; import os; new_event_loop().close(); os._exit(3)"
    done = subprocess.run(["bash", "-c", f"exec {closed}; exec {sys.executable} -c '{source}'"], check=False)
    assert done.returncode == 3


class TestCallSoon:
    def test_a_loop_is_not_woken_from_its_own_thread(self):
        async def main(loop: asyncio.AbstractEventLoop) -> list[str]:
            ran = []
            wake = loop.call_soon_threadsafe
            loop.call_soon_threadsafe = lambda *args, **more: ran.append("woken") or wake(*args, **more)
            call_threadsafe(loop, ran.append, "here")
            await asyncio.sleep(0)
            return ran

        with contextlib.closing(asyncio.SelectorEventLoop()) as loop:
            assert loop.run_until_complete(main(loop)) == ["here"]

    def test_a_loop_of_another_thread_is_woken(self, rlinf_leak_check):
        io, ran = IoThread("io"), threading.Event()
        call_threadsafe(io.loop, ran.set)
        assert ran.wait(10)
        io.stop()
        call_threadsafe(io.loop, ran.clear)
        assert ran.is_set()


async def test_flood_of_control_messages_is_handled_in_turns_and_in_order(tmp_path):
    """A member that sends 65,536 requests in a chunk must not delay beats, timers and signals until all are handled."""
    loop, network = asyncio.get_running_loop(), ZmqNetwork(asyncio.get_running_loop(), Security())
    handled, turns, ended = [], [0], asyncio.Event()

    def handle(peer: bytes, header: bytes, parts: list) -> None:
        handled.append(int(header))
        turns[-1] += 1
        if len(handled) == 15_000:
            ended.set()

    def turn() -> None:
        turns.append(0)
        loop.call_soon(turn)

    listener = network.listener(handle)
    link = network.link(listener.bind(f"ipc://{tmp_path}/s"), b"me", lambda *_: None)
    turn()
    for n in range(15_000):
        link.send(b"%d" % n)
        if n % 5000 == 4999:
            await asyncio.sleep(0)  # a chunk is sent
    await asyncio.wait_for(ended.wait(), 60)
    assert handled == list(range(15_000))
    assert max(turns) <= 2 * SLICE  # an edge of the descriptor may add one
    network.close()


def test_a_signal_is_heard_although_a_thousand_messages_find_no_peer(tmp_path, rlinf_leak_check):
    """300 wake-ups in one turn fill the pipe of asyncio's loop, which then drops the byte of a signal."""

    async def main(loop: asyncio.AbstractEventLoop) -> None:
        heard, gone = asyncio.Event(), []
        loop.add_signal_handler(signal.SIGUSR1, heard.set)
        network = ZmqNetwork(loop, Security())
        listener = network.listener(lambda *_: None)
        listener.bind(f"ipc://{tmp_path}/s")
        listener.on_unreachable = gone.append
        await asyncio.sleep(0)  # the listener has looked for messages
        for n in range(1000):
            listener.send(b"gone-%d" % n, b"header")
        loop.call_soon(os.kill, os.getpid(), signal.SIGUSR1)  # in the turn in which they are sent
        await asyncio.wait_for(heard.wait(), 20)
        assert len(gone) == 1000
        loop.remove_signal_handler(signal.SIGUSR1)
        network.close()

    with contextlib.closing(asyncio.SelectorEventLoop()) as loop:  # not uvloop's, which wakes by other means
        loop.run_until_complete(main(loop))


@pytest.mark.parametrize("kind", [ZmqNetwork, LocalNetwork])
async def test_what_is_sent_after_the_last_message_leaves_with_the_answers(kind, tmp_path):
    network, arrived = kind(asyncio.get_running_loop(), Security()), asyncio.Queue()
    listener = network.listener(lambda peer, header, parts: listener.send(peer, b"answer"))
    listener.on_drained = lambda: listener.send(b"client", b"notice")
    link = network.link(
        listener.bind(f"ipc://{tmp_path}/s"),
        b"client",
        lambda peer, header, parts: arrived.put_nowait(header),
        LinkOptions(to="w"),
    )
    link.send(b"question")
    assert [await asyncio.wait_for(arrived.get(), 20), arrived.get_nowait()] == [b"answer", b"notice"]
    network.close()


RUN_DAEMON = """
import asyncio
from rlinf_actors.net.daemon import run_daemon

async def serve():
    print(type(asyncio.get_running_loop()).__module__)
    return 3

raise SystemExit(run_daemon(serve))
"""


def test_daemons_run_on_uvloop():
    pytest.importorskip("uvloop")
    done = subprocess.run([sys.executable, "-c", RUN_DAEMON], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (3, "uvloop"), done.stderr


@pytest.mark.parametrize("address", ["host", ":1", "host:", "host:65536", "host:²", f"host:{'9' * 5000}", "a/b:1"])
def test_text_that_is_no_address_is_an_error_of_the_configuration(address):
    with pytest.raises(ConfigError, match="it must be HOST:PORT"):
        split_address(address, "--connect")
