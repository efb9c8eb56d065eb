"""The keeper's decisions, with a process table and a clock instead of the kernel's."""

import asyncio
import errno
import json
import os
import shutil
import signal
import socket
from functools import partial

import pace
import pytest
from lease import leased

from agentd import keeper
from agentd.keeper import ORPHANS_S, Keeper
from agentd.keeper_client import KeeperClient

TEMPLATE, WORKER = 7, 8
KILLED = signal.SIGKILL.value


class Kernel:
    """The keeper's children. `then` is called once, after a check that found the template alive."""

    def __init__(self):
        self.now = 100.0
        self.states = {TEMPLATE: b"S"}
        self.killed = []
        self.then = lambda: None

    def template_dies(self, state=b"Z"):
        """End the template: its worker becomes the keeper's child. In *state* T, its other threads still run."""
        self.states |= {TEMPLATE: state, WORKER: b"S"}

    def children(self):
        return list(self.states)

    def stat(self, pid):
        return [self.states[pid].replace(b"T", b"Z")]

    def waitpid(self, pid, flags):
        if self.states[pid] == b"Z":
            del self.states[pid]
            return pid, KILLED
        then, self.then = self.then, lambda: None
        then()
        return 0, 0

    def kill(self, pid, number):
        if pid not in self.states:
            raise ProcessLookupError
        self.killed.append((pid, number))


@pytest.fixture
def kernel(monkeypatch):
    made = Kernel()
    monkeypatch.setattr(keeper, "children", made.children)
    monkeypatch.setattr(keeper, "stat", made.stat, raising=False)
    monkeypatch.setattr(keeper, "session", lambda pid: 0)
    monkeypatch.setattr(keeper.time, "monotonic", lambda: made.now)
    monkeypatch.setattr(keeper.os, "waitpid", made.waitpid)
    monkeypatch.setattr(keeper.os, "kill", made.kill)
    return made


@pytest.fixture
def kept(kernel):
    """A keeper with one template."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        made = Keeper(listener)
        made._ready[TEMPLATE] = True
        yield made
        os.close(made._wakeup)
        os.close(made._signals)


@pytest.fixture
def agent(kept):
    """agentd's end of its connection to the keeper, and the keeper's end."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    kept._callers[theirs.fileno()] = theirs
    kept._poll.register(theirs)
    with ours, theirs:
        yield ours, theirs


@pytest.mark.parametrize("state", [b"Z", b"T"], ids=["whole", "its last thread is ending"])
def test_workers_of_a_template_that_dies_during_a_check_get_their_grace(kept, kernel, state):
    kernel.then = lambda: kernel.template_dies(state)
    kept._tend_children()
    kept._tend_children()
    kernel.states.pop(TEMPLATE, None)
    kept._ready.clear()
    kernel.now += ORPHANS_S - 0.01
    kept._tend_children()
    assert kernel.killed == []
    kernel.now += 0.01
    kept._tend_children()
    assert kernel.killed == [(WORKER, KILLED)]


def test_deadline_that_passed_before_the_wait_is_due_at_once(kept, kernel):
    kernel.template_dies()
    kept._tend_children()
    kernel.now += ORPHANS_S - 0.001
    kept._tend_children()  # an event came early
    assert kernel.killed == []
    kernel.now += 0.002
    assert kept._patience_ms() == 0.0
    kept._tend_children()
    assert kernel.killed == [(WORKER, KILLED)]
    assert kept._patience_ms() is None, "the keeper spins until the worker has ended"


def test_sigterm_during_reaping_of_a_template_stops_the_keeper(kept, kernel, monkeypatch):
    handlers = {}
    monkeypatch.setattr(keeper.signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(keeper.signal, "set_wakeup_fd", lambda fd, **_: None)

    def reaped_just_now(self):
        kernel.states.clear()
        handlers[signal.SIGTERM](signal.SIGTERM, None)
        self._ready.clear()
        return True

    monkeypatch.setattr(Keeper, "_tend_children", reaped_just_now)
    kept.run()
    assert kernel.killed == []


@pytest.mark.parametrize("keep", [True, False])
def test_stopping_keeper_keeps_its_deadline_after_a_hello(kept, kernel, agent, keep):
    ours, theirs = agent
    kept._stop()
    due = kept._kill_templates_at
    kernel.now += 1.0
    kept._obey(theirs, {"do": "hello", "keep": keep}, [])
    assert json.loads(ours.recv(100)) == {"keeper": os.getpid()}
    kept._disconnect(theirs)
    assert kept._kill_templates_at == due


def test_stopping_keeper_starts_no_template(kept, agent, monkeypatch):
    ours, theirs = agent
    monkeypatch.setattr(Keeper, "_start", lambda *_: pytest.fail("it starts a template"))
    kept._obey(theirs, {"do": "hello", "keep": True}, [])
    kept._stop()
    with open(os.memfd_create("start"), "w+b") as order:
        order.write(b'{"number": 5}')
        order.seek(0)
        kept._obey(theirs, {"do": "start"}, [order.fileno()])
    ours.recv(100)
    assert json.loads(ours.recv(100)) == {"errno": errno.ESHUTDOWN, "number": 5}


def test_program_that_is_not_executed_in_time_is_given_up(kept, kernel, agent):
    ours, theirs = agent
    kept._obey(theirs, {"do": "hello", "keep": True}, [])
    ours.recv(100)
    failed, tell = os.pipe()
    kept._starting[failed] = keeper._Start(TEMPLATE, 3)
    kept._poll.register(failed)
    kernel.now += keeper.EXEC_S - 0.1
    kept._give_up_starts()
    assert kernel.killed == []
    kernel.now += 0.2
    assert kept._patience_ms() == 0.0
    kept._give_up_starts()
    os.close(tell)
    answer = json.loads(ours.recv(1000))
    assert (answer["errno"], answer["number"]) == (errno.ETIMEDOUT, 3)
    assert "its execution takes longer than" in answer["text"]
    assert kernel.killed == [(TEMPLATE, KILLED)]
    assert kept._patience_ms() is None
    kernel.template_dies()
    kept._tend_children()
    assert TEMPLATE not in kept._ready, "it is reaped as any template"


def test_next_agentd_gets_no_answer_to_an_order_of_the_one_before(kept, kernel, agent):
    """Each agentd numbers its orders from 1."""
    _, theirs = agent
    kept._obey(theirs, {"do": "hello", "keep": True}, [])
    failed, tell = os.pipe()
    kept._starting[failed] = keeper._Start(TEMPLATE, 1)
    kept._ready[TEMPLATE] = False
    kept._poll.register(failed)
    ours_next, theirs_next = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours_next, theirs_next:
        kept._callers[theirs_next.fileno()] = theirs_next
        kept._obey(theirs_next, {"do": "hello", "keep": True}, [])
        os.close(tell)
        assert kept._starting == {}
        assert kernel.killed == [(TEMPLATE, KILLED)]
        kernel.template_dies()
        kept._tend_children()
        said = [json.loads(ours_next.recv(1000)) for _ in range(2)]
    assert said == [{"keeper": os.getpid()}, {"ended": TEMPLATE, "status": KILLED}]


# --- the real one ---


@pytest.fixture
async def client(tmp_path):
    made = KeeperClient(asyncio.get_running_loop(), tmp_path, keep=False)
    null = os.open(os.devnull, os.O_RDWR)
    yield partial(_start, made, null)
    os.close(null)
    await made.close()


async def _start(client, null, argv, user=None):
    started = await client.start(argv, {}, [null, null], user)
    os.close(started.pidfd)
    return started.pid


@pytest.mark.live
async def test_program_whose_execution_is_held_up_holds_up_no_other(client, tmp_path):
    """A user can do that with a lease on the file; the keeper starts the templates of all users."""
    with leased(shutil.copy("/bin/true", tmp_path / "program")) as lease:
        held = asyncio.ensure_future(client([str(tmp_path / "program")]))
        await asyncio.to_thread(lease.asked)
        pid = await asyncio.wait_for(client(["/bin/true"]), pace.PATIENCE_S)
        assert not held.done()
    assert await asyncio.wait_for(held, pace.PATIENCE_S) not in (0, pid)


@pytest.mark.live
async def test_limit_that_cannot_be_set_is_named(client):
    with pytest.raises(PermissionError, match=r"limits in \[workers\] has nofile = 1099511627776"):
        await client(["/bin/true"], {**AS, "limits": {"nofile": 1 << 40}})
    with pytest.raises(FileNotFoundError):
        await client(["/nowhere/true"])


# --- agentd's end ---


@pytest.fixture
async def greeted(tmp_path):
    """agentd's client of a keeper, and that keeper's end of the connection, before the keeper has said anything."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "keeper"))
        listener.listen(1)
        client = KeeperClient(asyncio.get_running_loop(), tmp_path, keep=True)
        client.begin()
        peer, _ = listener.accept()
        with peer:
            assert json.loads(peer.recv(4096))["do"] == "hello"
            yield client, peer
            client.abandon()


AS = {"uid": 1, "gid": 1, "groups": [], "umask": 0, "limits": {}}


async def test_answers_are_for_the_orders_that_they_name(greeted):
    client, peer = greeted
    first, second = client.start(["/bin/a"], {}, [0, 0]), client.start(["/bin/b"], {}, [0, 0])
    numbers = []
    for _ in range(2):
        _, fds, _, _ = socket.recv_fds(peer, 4096, 5)
        numbers.append(json.loads(os.read(fds[0], 65536))["number"])
        for fd in fds:
            os.close(fd)
    peer.send(json.dumps({"errno": errno.ETIMEDOUT, "text": "held up", "number": numbers[1]}).encode())
    with pytest.raises(TimeoutError, match="held up"):
        await second
    assert not first.done()
    first.cancel()
