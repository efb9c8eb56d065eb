"""Lanes of gloo in one process: both ends here, each on its own thread; stores, and what ends a lane."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import struct
import threading
import weakref

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from rlinf_actors.errors import CallTimeoutError, PeerDiedError, RlinfActorsError  # noqa: E402
from rlinf_actors.messaging import lanes, process_groups  # noqa: E402
from rlinf_actors.messaging.lane_store import LaneStore  # noqa: E402
from rlinf_actors.messaging.process_groups import CollectiveGroupOptions  # noqa: E402

pytestmark = pytest.mark.torch

MIB = 1 << 20


class Job:
    """Runs a function on the lane's thread; see lanes.LaneJob."""

    def __init__(self, function=lambda wire: None):
        self._function = function
        self.value = None
        self.error = None
        self.ends = 0
        self._ended = threading.Event()

    def run(self, wire):
        self.value = self._function(wire)
        self._end()

    def fail(self, error):
        self.error = error
        self._end()

    def _end(self):
        self.ends += 1
        self._ended.set()

    def result(self):
        assert self._ended.wait(15)
        if self.error is not None:
            raise self.error
        return self.value


class Pair:
    """A lane from rank 0 to rank 1, and what their owners were told.

    *together*: neither end begins before the other is there, so that little time for a transfer is not little for that.
    """

    def __init__(self, timeout_s=30.0, clock=None, together=False):
        self.store = process_groups.GroupStore(process_groups.LOOPBACK, 30.0)
        self.broken = []
        self.told = threading.Semaphore(0)
        self._timeout_s = timeout_s
        self._clock = clock
        self._both = threading.Barrier(2 if together else 1)
        self.ends = []

    def open(self, rank):
        client = process_groups.join(self.store.endpoint, 30.0)

        def make():
            self._both.wait(15)
            return process_groups.wire(
                "gloo",
                client,
                rank,
                timeout_s=self._timeout_s,
                ip=process_groups.LOOPBACK,
                options=CollectiveGroupOptions(),
            )

        release = self.store.close if rank == 0 else lambda: None
        lane = lanes.Lane(f"test {rank}", make, self._broke, release, self._clock)
        self.ends.append(lane)
        return lane

    def _broke(self, lane, error):
        self.broken.append((lane, error))
        self.told.release()

    def close(self):
        for lane in self.ends:
            lane.end(lambda: RlinfActorsError("the test is over"))
        for lane in self.ends:
            lane._thread.join(15)
            assert not lane._thread.is_alive()
        self.store.close()


@pytest.fixture(scope="module")
def warm():
    """What torch opens once in a process, for good."""
    process_groups.GroupStore(process_groups.LOOPBACK, 5.0).close()


@pytest.fixture
def pair(warm, rlinf_leak_check):
    made = []

    def make(**options):
        made.append(Pair(**options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def sent(count, first=0):
    return Job(lambda wire: wire.send([torch.full((MIB,), first + n, dtype=torch.uint8) for n in range(count)]))


def received(count):
    def run(wire):
        buffers = [torch.empty(MIB, dtype=torch.uint8) for _ in range(count)]
        wire.recv(buffers)
        return [int(buffer[0]) if (buffer == buffer[0]).all() else -1 for buffer in buffers]

    return Job(run)


def post(lane, job):
    lane.post(job)
    return job


def test_jobs_run_in_the_order_posted_whichever_end_opens_first(pair):
    made = pair()
    sender = made.open(0)
    sends = [post(sender, sent(1 + n % 3, n)) for n in range(10)]  # nobody has joined
    receiver = made.open(1)
    receives = [post(receiver, received(1 + n % 3)) for n in range(10)]
    for n, receive in enumerate(receives):
        assert receive.result() == [n + k for k in range(1 + n % 3)]
    for send in sends:
        send.result()
    assert not dist.is_initialized()


def test_an_idle_lane_keeps_nothing_of_its_last_job(pair):
    made = pair()
    sender, receiver = made.open(0), made.open(1)
    freed = [threading.Event(), threading.Event()]
    jobs = [post(sender, sent(1)), post(receiver, received(1))]
    for job, event in zip(jobs, freed, strict=True):
        weakref.finalize(job, event.set)
        job.result()
    del job, jobs
    assert [event.wait(15) for event in freed] == [True, True]


def test_many_lanes_both_ways_at_once(pair):
    ways = [pair() for _ in range(4)]
    ends = [(made.open(n % 2), made.open(1 - n % 2)) for n, made in enumerate(ways)]
    jobs = []
    for n, (first, second) in enumerate(ends):
        sender, receiver = (first, second) if n % 2 == 0 else (second, first)
        for k in range(5):
            jobs += [(post(sender, sent(2, k)), post(receiver, received(2)), k)]
    for send, receive, k in jobs:
        send.result()
        assert receive.result() == [k, k + 1]


def test_the_users_default_group_is_independent(pair, tmp_path):
    made = pair()
    sender, receiver = made.open(0), made.open(1)
    first = post(sender, sent(1, 7)), post(receiver, received(1))
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert first[1].result() == [7]
        second = post(sender, sent(1, 8)), post(receiver, received(1))
        mine = torch.ones(2)
        dist.all_reduce(mine)
        assert second[1].result() == [8]
        assert (mine.tolist(), dist.get_world_size()) == ([1.0, 1.0], 1)
    finally:
        dist.destroy_process_group()
    third = post(sender, sent(1, 9)), post(receiver, received(1))
    assert third[1].result() == [9]
    assert not dist.is_initialized()


def test_a_lane_that_nobody_joins_is_ended_by_its_owner(pair):
    made = pair()
    sender = made.open(0)
    job = post(sender, sent(1))
    later = Job()
    sender.end(lambda: PeerDiedError("b:0 is gone", peer="b:0"))
    with pytest.raises(PeerDiedError, match="b:0 is gone"):
        job.result()
    sender.post(later)
    with pytest.raises(PeerDiedError):
        later.result()
    assert (job.ends, later.ends) == (1, 1)


def test_the_end_of_one_side_breaks_the_other(pair):
    made = pair()
    sender, receiver = made.open(0), made.open(1)
    first = post(receiver, received(1))
    post(sender, sent(1, 3)).result()
    assert first.result() == [3]
    waiting = post(receiver, received(1))
    # its group goes away with its thread, and the sockets with it
    sender.end(lambda: RlinfActorsError("this side has had enough"))
    assert made.told.acquire(timeout=15)
    assert made.broken[0][0] is receiver
    assert waiting.ends == 0  # until its owner knows whether the other worker lives
    receiver.end(lambda: PeerDiedError("a:0 is gone", peer="a:0"))
    with pytest.raises(PeerDiedError, match="a:0 is gone"):
        waiting.result()


def test_a_job_that_raises_breaks_the_lane_once(pair):
    made = pair()
    sender, receiver = made.open(0), made.open(1)

    def fail(wire):
        raise RuntimeError("no such tensor")

    job, behind = post(sender, Job(fail)), post(sender, Job())
    assert made.told.acquire(timeout=15)
    assert [(lane, str(error)) for lane, error in made.broken] == [(sender, "no such tensor")]
    assert str(sender.error) == "no such tensor"
    sender.end(lambda: RlinfActorsError("broken"))
    for one in (job, behind):
        with pytest.raises(RlinfActorsError, match="broken"):
            one.result()
    assert receiver.error is None


def test_a_transfer_that_times_out_breaks_the_lane(pair):
    made = pair(timeout_s=1.0, together=True)
    sender, receiver = made.open(0), made.open(1)
    post(receiver, Job()).result()
    post(sender, sent(1))  # nobody receives
    assert made.told.acquire(timeout=15)
    lane, error = made.broken[0]
    assert lane is sender
    assert isinstance(error, CallTimeoutError)
    assert "RLINF_TIMEOUT" in str(error)


def test_the_clock_breaks_the_lane_when_a_job_is_late(pair):
    clocks, stopped = [], threading.Semaphore(0)

    def clock(late):
        clocks.append(late)
        return lambda: (clocks.remove(late), stopped.release())

    made = pair(clock=clock)
    sender, receiver = made.open(0), made.open(1)
    post(receiver, received(1))
    post(sender, sent(1)).result()
    post(receiver, Job()).result()
    for _ in range(3):  # a moment after the job's end
        assert stopped.acquire(timeout=15)
    started, go_on = threading.Event(), threading.Event()
    stuck = post(sender, Job(lambda wire: (started.set(), go_on.wait(15))))
    assert started.wait(15)
    assert len(clocks) == 1
    clocks[0]()
    assert made.told.acquire(timeout=1)
    assert isinstance(made.broken[0][1], CallTimeoutError)
    sender.end(lambda: CallTimeoutError("late"))
    with pytest.raises(CallTimeoutError, match="late"):
        stuck.result()
    assert sender._thread.is_alive()  # it does not let go
    go_on.set()


# --- stores ---


def test_a_store_listens_on_its_address_alone():
    store = process_groups.GroupStore(process_groups.LOOPBACK, 5.0)
    ip, _, port = store.endpoint.rpartition(":")
    assert ip == "127.0.0.1"
    inodes = {os.stat(f"/proc/self/fd/{fd}").st_ino for fd in os.listdir("/proc/self/fd") if _is_socket(fd)}
    with open("/proc/net/tcp") as table:
        mine = [line.split()[1] for line in table.readlines()[1:] if int(line.split()[9]) in inodes]
    assert f"0100007F:{int(port):04X}" in mine
    assert not any(where.startswith("00000000") for where in mine)
    store.close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", int(port)), 5)


def _is_socket(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
    except OSError:
        return False


def test_a_store_on_another_machines_address_is_an_error():
    with pytest.raises(OSError, match="assign"):
        process_groups.GroupStore("192.0.2.1", 5.0)


@pytest.mark.parametrize(
    ("same_node", "devices", "ip"),
    [
        (True, "eth1", "127.0.0.1"),
        (False, None, "10.0.0.9"),
        (False, "eth1", "10.1.0.2"),
        (False, "ib0,eth1", "10.1.0.2"),
        (False, "ib0", "10.0.0.9"),
    ],
)
def test_the_advertised_address(same_node, devices, ip):
    found = process_groups.advertised_ip(same_node, "10.0.0.9", devices, {"eth0": "10.0.0.9", "eth1": "10.1.0.2"})
    assert found == ip


def test_the_advertised_address_may_be_the_second_of_its_interface():
    addresses = {"eth0": "10.0.0.1", "eth1": "10.1.0.2"}
    assert process_groups.advertised_ip(False, "10.0.0.9", "eth0", addresses, "eth0") == "10.0.0.9"
    assert process_groups.advertised_ip(False, "10.0.0.9", "eth1", addresses, "eth0") == "10.1.0.2"


def test_gloo_takes_the_interface_that_its_variable_names(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    store = process_groups.GroupStore(process_groups.LOOPBACK, 5.0)
    with pytest.raises(RuntimeError, match="no-such-interface"):
        process_groups.make("gloo", process_groups.join(store.endpoint, 5.0), 0, 1, timeout_s=5.0, ip="10.0.0.9")
    made = process_groups.make(
        "gloo", process_groups.join(store.endpoint, 5.0), 0, 1, timeout_s=5.0, ip=process_groups.LOOPBACK
    )
    assert made.size() == 1  # within a node it is not asked
    store.close()


def test_gloo_is_a_back_end():
    assert "gloo" in process_groups.backends()


def test_gloo_takes_a_stranger_who_guesses_a_small_number_for_the_other_end():
    """What docs/explanation/security.md says of gloo's data sockets; a lane's own store does not change it."""
    address = queue.Queue()
    store = LaneStore(lambda key, value: address.put((key, value)), 15.0, begins=True)
    made = []
    options = {"timeout_s": 15.0, "ip": process_groups.LOOPBACK}
    making = threading.Thread(
        target=lambda: made.append(process_groups.make("gloo", store.for_torch(), 0, 2, **options))
    )
    making.start()
    key, ours = address.get(timeout=15)
    port = ours.index(socket.inet_aton(process_groups.LOOPBACK)) - 2
    with contextlib.ExitStack() as strangers:
        for number in range(3):
            where = ("127.0.0.1", int.from_bytes(ours[port : port + 2], "big"))
            strangers.enter_context(socket.create_connection(where, 15)).sendall(struct.pack("<Q", number))
        # the highest port: gloo lets the member with the lower address wait for the other's connection
        store.arrived(key.replace("/0/0", "/0/1"), ours[:port] + b"\xff\xff" + ours[port + 2 :])
        making.join(15)
        assert [group.size() for group in made] == [2], "a group of two, and no second member"
