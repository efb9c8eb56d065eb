"""Head, agent sessions and drivers in one loop over the memory network, with fake workers."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from agentd.node_state import Policy
from agentd.session import Session
from rlinf_actors import compat
from rlinf_actors.errors import ClusterTimeoutError, NameInUseError
from rlinf_actors.exhaustion import AGAIN_S
from rlinf_actors.head.commands import Timing
from rlinf_actors.head.server import HeadServer
from rlinf_actors.net.failure_detection import RETRY_MIN_S
from rlinf_actors.net.host import pid_start
from rlinf_actors.net.link import peer_name
from rlinf_actors.net.rpc import ControlClient
from rlinf_actors.wire.agent_messages import (
    ClientHello,
    Flushing,
    FlushLogs,
    Goodbye,
    LogCredit,
    LogLines,
    Welcome,
    WorkerExited,
    WorkerReady,
)
from rlinf_actors.wire.client_messages import (
    Done,
    GetNodes,
    GetStatus,
    Launch,
    Launched,
    Nodes,
    StopGroup,
    WorkerChanged,
)
from rlinf_actors.wire.protocol import PROTOCOL
from rlinf_actors.wire.template_protocol import NodeRegistered
from rlinf_actors.wire.values import Claim, Endpoint, ExitReport, NodeReport, WorkerSpec
from tests.memory_network import MemoryNetwork

pytestmark = pytest.mark.virtual_time

ENDPOINT = "ipc:///nowhere/head"  # no listener: for an agent's check, the head does not run
TIMING = Timing(beat_s=0.05, lease_s=0.4, robot_lease_s=0.2, orphan_grace_s=0.1)


class FakeWorkers:
    """Workers are ready at once and end when they are stopped."""

    def __init__(self, report):
        self.report = report
        self.alive: dict[str, WorkerSpec] = {}
        self.stops: list[tuple[list[str], float]] = []
        self.credits: list[tuple[int, str]] = []
        self.renewals: list[float] = []
        self.reasons: list[str] = []
        self.told: list[str] = []
        self.keep_s = 0.0
        self.registrations: list[NodeRegistered] = []
        self.closed = False

    def start(self, order):
        loop = asyncio.get_running_loop()
        for spec in order.workers:
            self.alive[spec.id] = spec
            loop.call_soon(self.report, WorkerReady(spec.id, 9, Endpoint("h", f"ipc://{spec.id}"), 0, 4000))

    def stop(self, ids, grace_s, reason=""):
        self.stops.append((ids, grace_s))
        self.reasons.append(reason)
        for id in ids:
            self.end(id, ExitReport("stopped", None, 15))

    def end(self, id, exit):
        if self.alive.pop(id, None) is not None:
            asyncio.get_running_loop().call_soon(self.report, WorkerExited(id, exit))

    def credit_logs(self, chars, owner):
        self.credits.append((chars, owner))

    def flush_logs(self, owner, wait_s):
        self.report(LogLines(owner, "n0", [], final=True, left=3, where="/logs"))

    def renew(self, until, lease_s):
        self.renewals.append(until)

    def acknowledged(self, ids):
        self.told += ids

    def registered(self, keep_s, packet):
        self.keep_s = keep_s
        self.registrations.append(packet)

    async def close(self, grace_s, reason=""):
        self.stop(list(self.alive), grace_s)
        await asyncio.sleep(0)
        self.closed = True


class Agent:
    def __init__(self, network, id, **report):
        fields = {"hostname": id, "ip": "127.0.0.1", "host": f"host-{id}", "num_cpus": 1, "memory_bytes": 1}
        self.report = NodeReport(node_id=id, python="3", interpreter="/py", **{**fields, **report})
        self.registered = 0
        self.says: list[str] = []
        self.session = Session(
            network,
            ENDPOINT,
            self.report,
            policy=Policy(head_grace_s=30.0, stop_grace_s=0.1),
            on_registered=self._registered,
            on_status=self.says.append,
        )
        self.children = FakeWorkers(self.session.report)
        self.session.attach(self.children)
        self.task = asyncio.get_running_loop().create_task(self.session.run())

    def _registered(self):
        self.registered += 1

    @property
    def identity(self):
        return self.session.identity


class Driver:
    def __init__(self, network, name, namespace="ns", host="elsewhere", pid=0, pid_start=0):
        self.hello = ClientHello(PROTOCOL, "1", name, "driver", namespace, host, pid, pid_start)
        self.notices: list = []
        self.client = ControlClient(network, ENDPOINT, f"driver:{name}".encode(), self.notices.append)

    async def ask(self, body):
        return await self.client.request(body, 5)

    async def launch(self, group, nodes, launch=""):
        specs = [WorkerSpec(f"{launch or group}-{r}", group, "ns", r, len(nodes), n, {}) for r, n in enumerate(nodes)]
        return await self.ask(Launch("ns", group, "m:C", specs))

    def states(self, group):
        """The last reported state of each rank."""
        heard = [n for n in self.notices if isinstance(n, WorkerChanged) and n.group == group]
        return {worker.rank: worker.state for notice in heard for worker in notice.workers}


class Lab:
    def __init__(self):
        self._changed = asyncio.Event()
        self.network = MemoryNetwork(asyncio.get_running_loop())
        self.network.drop = self._saw
        self.agents: list[Agent] = []
        self.start_head()

    def start_head(self, **timing):
        self.head = HeadServer(self.network, timing=msgspec.structs.replace(TIMING, **timing), embedded=True)
        self.head.start([ENDPOINT])

    def _saw(self, identity, header):
        """Called for each sent message: check the awaited fact after its arrival."""
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, self._changed.set)
        return False

    async def until(self, fact):
        """Wait for a fact that follows from a message in the same turn of the loop."""
        async with compat.timeout(10):
            while not fact():
                self._changed.clear()
                await self._changed.wait()

    def agent(self, id, **report):
        self.agents.append(Agent(self.network, id, **report))
        return self.agents[-1]

    async def driver(self, name="d1", **fields):
        driver = Driver(self.network, name, **fields)
        assert isinstance(await driver.ask(driver.hello), Welcome)
        return driver


@pytest_asyncio.fixture
async def lab():
    made = Lab()
    yield made
    for agent in made.agents:
        if not agent.task.done():
            agent.session.stop("the test ends")
            await agent.task
    made.head.close()
    made.network.close()


async def test_nodes_register_and_groups_run_and_end(lab):
    one, two = lab.agent("n0"), lab.agent("n1")
    driver = await lab.driver()
    nodes = await driver.ask(GetNodes(2, 5.0))
    assert isinstance(nodes, Nodes)
    assert [(node.rank, node.report.node_id) for node in nodes.nodes] == [(0, "n0"), (1, "n1")]
    launched = await driver.launch("g", [0, 1, 1])
    assert isinstance(launched, Launched)
    await lab.until(lambda: driver.states("g") == {0: "running", 1: "running", 2: "running"})
    assert set(one.children.alive) == {"g-0"}
    assert set(two.children.alive) == {"g-1", "g-2"}
    two.children.end("g-2", ExitReport("signalled", None, 9))
    await lab.until(lambda: driver.states("g")[2] == "gone")
    with pytest.raises(NameInUseError):
        await driver.launch("g", [0], "again")
    assert await driver.ask(StopGroup("ns", "g", 0.1)) == Done()
    assert driver.states("g") == {0: "gone", 1: "gone", 2: "gone"}
    assert one.children.alive == two.children.alive == {}


async def test_a_timeout_names_the_missing_rank(lab):
    lab.agent("n0")
    driver = await lab.driver()
    with pytest.raises(ClusterTimeoutError, match=r"1 of 2 nodes.*missing rank 1") as failed:
        await driver.ask(GetNodes(2, 0.2))
    assert failed.value.missing_ranks == (1,)


async def test_drain_stops_workers_and_says_goodbye(lab):
    agent = lab.agent("n0")
    driver = await lab.driver()
    await driver.ask(GetNodes(1))
    await driver.launch("g", [0])
    await lab.until(lambda: driver.states("g") == {0: "running"})
    agent.session.stop("SIGTERM")
    end = await agent.task
    assert (end.code, agent.children.closed) == (0, True)
    await lab.until(lambda: driver.states("g") == {0: "gone"})
    assert (await driver.ask(GetStatus())).nodes == []


async def test_a_refused_node_exits_with_78_and_the_reason(lab):
    lab.agent("n0", rank=0)
    driver = await lab.driver()
    await driver.ask(GetNodes(1))
    end = await lab.agent("n1", rank=0).task
    assert end.code == 78
    assert "RLINF_NODE_RANK" in end.text


async def test_goodbye_of_a_driver_ends_its_groups(lab):
    agent = lab.agent("n0")
    driver = await lab.driver()
    await driver.ask(GetNodes(1))
    await driver.launch("g", [0])
    await lab.until(lambda: agent.children.alive)
    driver.client.notify(Goodbye("bye"))
    await lab.until(lambda: not agent.children.alive)
    assert agent.children.stops == [(["g-0"], 0.1)]


async def test_the_end_of_a_watched_driver_is_noticed_by_its_pidfd(lab, sleeper):
    agent = lab.agent("n0", host="here")
    driver = await lab.driver(host="here", pid=sleeper.pid, pid_start=pid_start(sleeper.pid))
    await driver.ask(GetNodes(1))
    await driver.launch("g", [0])
    await lab.until(lambda: agent.children.alive)
    sleeper.kill()
    sleeper.wait()  # at once, as the loop sees it
    await lab.until(lambda: not agent.children.alive)


async def test_a_driver_that_ended_before_the_watch_is_noticed(lab):
    lab.agent("n0", host="here")
    first = Driver(
        lab.network, "d1", host="here", pid=os.getpid(), pid_start=1
    )  # the pid belongs to another process by now
    await first.ask(first.hello)
    # its connection stands, so the agent's report is not enough: the head waits one lease without beats
    await lab.until(lambda: any(isinstance(notice, Goodbye) and "silent" in notice.reason for notice in first.notices))


async def test_driver_is_watched_as_soon_as_a_descriptor_is_free(lab, sleeper, monkeypatch, caplog):
    read, used_up = Path.read_bytes, True
    tried = asyncio.Event()

    def none_left(path):
        if used_up and path == Path(f"/proc/{sleeper.pid}/stat"):
            tried.set()
            raise OSError(errno.EMFILE, "Too many open files")
        return read(path)

    start = pid_start(sleeper.pid)
    monkeypatch.setattr(Path, "read_bytes", none_left)
    agent = lab.agent("n0", host="here")
    driver = await lab.driver(host="here", pid=sleeper.pid, pid_start=start)
    await driver.ask(GetNodes(1))
    await driver.launch("g", [0])
    for _ in range(2):
        tried.clear()
        await tried.wait()
    assert agent.children.alive, "a driver that cannot be watched has not ended"
    (said,) = [record.getMessage() for record in caplog.records if "cannot watch process" in record.getMessage()]
    assert "Too many open files" in said
    used_up = False
    sleeper.kill()
    sleeper.wait()
    await lab.until(lambda: not agent.children.alive)


async def test_ended_session_stops_trying_to_watch_drivers(lab, sleeper, monkeypatch):
    tries: list[int] = []

    def none_left(pid, started):
        tries.append(pid)
        raise OSError(errno.ENFILE, "Too many open files in system")

    monkeypatch.setattr("agentd.session.procfs.open_pidfd", none_left)
    agent = lab.agent("n0", host="here")
    driver = await lab.driver(host="here", pid=sleeper.pid, pid_start=pid_start(sleeper.pid))
    await driver.ask(GetNodes(1))
    await lab.until(lambda: tries)
    agent.session.stop("over")
    await agent.task
    tries.clear()
    await asyncio.sleep(2 * AGAIN_S)
    assert tries == []


async def test_output_reaches_the_driver_and_credit_the_agent(lab):
    agent = lab.agent("n0")
    driver = await lab.driver()
    await driver.ask(GetNodes(1))
    lines = LogLines("ns", "n0", [("g:0", "out", "hello")])
    agent.children.report(lines)
    await lab.until(lambda: lines in driver.notices)
    driver.client.notify(LogCredit("ns", "n0", 5))
    await lab.until(lambda: agent.children.credits == [(5, "ns")])


async def test_ending_driver_gets_each_nodes_count_of_unsent_lines(lab):
    lab.agent("n0")
    lab.agent("n1")
    driver = await lab.driver()
    await driver.ask(GetNodes(2))
    await driver.launch("g", [0])
    await lab.until(lambda: driver.states("g") == {0: "running"})
    assert await driver.ask(FlushLogs("ns", 2.0)) == Flushing(1), "the other node has none of its workers"
    final = LogLines("ns", "n0", [], final=True, left=3, where="/logs")
    await lab.until(lambda: final in driver.notices)


async def test_cut_off_node_is_lost_ends_its_workers_and_returns(lab, tmp_path):
    agent = lab.agent("n0")
    driver = await lab.driver()
    await driver.ask(GetNodes(1))
    await driver.launch("g", [0])
    await lab.until(lambda: driver.states("g") == {0: "running"})
    before = agent.identity
    lab.network.cut(before)
    beats = asyncio.get_running_loop().create_task(_beat(driver))
    await lab.until(lambda: driver.states("g") == {0: "gone"})
    lab.network.heal(before)
    await lab.until(lambda: agent.registered == 2)
    beats.cancel()
    assert agent.identity != before
    assert agent.children.alive == {}
    status = await driver.ask(GetStatus())
    assert [(node.report.node_id, node.state, node.rank) for node in status.nodes] == [("n0", "ready", 0)]


async def test_each_connection_to_the_head_has_an_identity_of_its_own(lab):
    """Two with one identity could come to a starting head in the wrong order: the newer one would be deaf then."""
    lost, drop = [], lab.network.drop

    def is_lost(identity, header):
        if lost or b"AgentHello" not in header:
            return drop(identity, header)
        lost.append(identity)
        return True

    lab.network.drop = is_lost
    agent = lab.agent("n0")
    await lab.until(lambda: agent.registered == 1)
    assert agent.identity != lost[0]
    assert peer_name(agent.identity) == peer_name(lost[0])


async def test_failed_connection_is_tried_again_and_logged_once(lab, monkeypatch):
    agent = lab.agent("n0")
    await lab.until(lambda: agent.registered == 1)
    link, refused = lab.network.link, []

    def none_for_a_while(endpoint, identity, *args, **options):
        if len(refused) == 5:
            return link(endpoint, identity, *args, **options)
        refused.append(asyncio.get_running_loop().time())
        raise OSError(errno.EADDRINUSE, "cannot open a socket: all are taken")

    monkeypatch.setattr(lab.network, "link", none_for_a_while)
    lab.network.cut(agent.identity)
    lab.network.dark.add(ENDPOINT)  # this incarnation ends, and the next one begins with a new connection
    await lab.until(lambda: agent.registered == 2)
    pauses = [later - before for before, later in itertools.pairwise(refused)]
    assert min(pauses) >= RETRY_MIN_S / 2
    assert pauses[-1] > pauses[0]
    text = f"not registered yet: no connection to the head at {ENDPOINT} can be made: cannot open a socket: all are"
    assert len([said for said in agent.says if said.startswith(text)]) == 1


async def test_agent_without_any_connection_ends_with_the_reason(lab, monkeypatch):
    def none(*args, **options):
        raise OSError(errno.EMFILE, "cannot open a socket: all are taken")

    monkeypatch.setattr(lab.network, "link", none)
    with pytest.raises(OSError, match="cannot open a socket"):
        await lab.agent("n0").task


async def test_robot_worker_of_a_cut_off_node_ends_first_and_its_owner_is_notified(lab):
    agent = lab.agent("n0")
    driver = await lab.driver()
    await driver.ask(GetNodes(1))
    await driver.launch("plain", [0])
    arm = WorkerSpec("arm-0", "arm", "ns", 0, 1, 0, {}, claims=(Claim("Franka:1", "Franka 1"),))
    await driver.ask(Launch("ns", "arm", "m:C", [arm]))
    beats = asyncio.get_running_loop().create_task(_beat(driver))
    await lab.until(lambda: len(agent.children.renewals) > 3)
    assert agent.children.renewals == sorted(agent.children.renewals)
    lab.network.cut(agent.identity)
    await lab.until(lambda: driver.states("arm") == {0: "gone"})
    await lab.until(lambda: agent.children.stops)
    beats.cancel()
    assert agent.children.stops[0] == (["arm-0"], 0.0)
    assert agent.children.reasons[0].startswith("no word from the head for ")


async def _beat(driver):
    from rlinf_actors.wire.agent_messages import Beat

    while True:
        driver.client.notify(Beat(driver.hello.incarnation))
        await asyncio.sleep(TIMING.beat_s)


async def test_a_restarted_head_loses_no_worker(lab):
    agent = lab.agent("n0")
    driver = await lab.driver()
    await driver.ask(GetNodes(1))
    await driver.launch("g", [0, 0])
    await lab.until(lambda: driver.states("g") == {0: "running", 1: "running"})
    lab.head.close()
    await lab.until(lambda: any("but its machine does; workers go on" in text for text in agent.says))
    agent.children.end("g-1", ExitReport("exited", 1))
    lab.start_head()
    await lab.until(lambda: agent.registered == 2)
    assert isinstance(await driver.ask(driver.hello), Welcome)
    await lab.until(lambda: driver.states("g") == {0: "running", 1: "gone"})
    assert set(agent.children.alive) == {"g-0"}
    assert await driver.ask(StopGroup("ns", "g", 0.1)) == Done()
    assert agent.children.alive == {}


async def test_silent_driver_outlives_the_heads_restart_while_its_process_lives(lab, sleeper):
    agent = lab.agent("n0", host="here")
    silent = await lab.driver("silent", host="here", pid=sleeper.pid, pid_start=pid_start(sleeper.pid))
    other = await lab.driver("other")
    await silent.ask(GetNodes(1))
    await silent.launch("g", [0])
    await other.launch("h", [0])
    await lab.until(lambda: len(agent.children.alive) == 2)
    lab.head.close()
    lab.start_head(return_s=0.1)
    await lab.until(
        lambda: set(agent.children.alive) == {"g-0"}
    )  # no agent watches the other driver: the head gives it up
    assert isinstance(await silent.ask(silent.hello), Welcome)
    sleeper.kill()
    sleeper.wait()
    await lab.until(lambda: not agent.children.alive)


async def test_agent_registers_again_with_a_restarted_head(lab):
    agent = lab.agent("n0")
    await lab.until(lambda: agent.registered == 1)
    lab.head.close()
    lab.start_head()
    await lab.until(lambda: agent.registered == 2)


async def test_workers_are_told_of_a_restarted_head_and_of_a_lost_connection(lab):
    agent = lab.agent("n0")
    await lab.until(lambda: agent.registered == 1)
    first = agent.children.registrations[0].epoch
    lab.network.reset(agent.identity)
    await lab.until(lambda: agent.registered == 2)
    lab.head.close()
    lab.start_head()
    await lab.until(lambda: agent.registered == 3)
    second = agent.children.registrations[-1].epoch
    assert second != first
    assert agent.children.registrations == [
        NodeRegistered(first), NodeRegistered(first, again=True), NodeRegistered(second),
    ]  # fmt: skip


async def test_agent_waits_for_a_head_that_starts_later(lab):
    lab.head.close()
    agent = lab.agent("n0")
    await lab.until(lambda: any("not registered yet" in text for text in agent.says))
    lab.start_head()
    await lab.until(lambda: agent.registered == 1)


async def test_an_agent_that_never_found_its_head_can_be_stopped(lab):
    lab.head.close()
    agent = lab.agent("n0")
    agent.session.stop("enough")
    assert (await agent.task).code == 0
    lab.start_head()


async def test_malformed_bytes_are_counted_and_ignored(lab):
    agent = lab.agent("n0")
    await lab.until(lambda: agent.registered == 1)
    link = lab.network.link(ENDPOINT, b"stranger", lambda *message: None)
    link.send(b"\x00rubbish")
    link.send(msgspec.msgpack.encode({"type": "not", "body": {"type": "Spawn"}}))
    await lab.until(lambda: lab.head._server._malformed.count == 2)
    assert agent.registered == 1


async def test_stall_of_the_agent_ends_robot_leases_and_is_logged_once(lab, monkeypatch):
    """SIGSTOP for three seconds: the late timer reports the stall once, then beats continue."""
    agent = lab.agent("n0")
    driver = await lab.driver("d1")
    await driver.ask(GetNodes(1))
    spec = WorkerSpec("arm-0", "arm", "ns", 0, 1, 0, {}, claims=(Claim("Arm:1", "Arm 1"),))
    await driver.ask(Launch("ns", "arm", "m:C", [spec]))
    await lab.until(lambda: "arm-0" in agent.children.alive)
    session, loop = agent.session, asyncio.get_running_loop()
    due = loop.time()

    class Later:
        def __getattr__(self, name):
            return getattr(loop, name)

        def time(self):
            return due + 3.0

    monkeypatch.setattr(session._shell, "_loop", Later())
    session._shell._tick(due)
    assert any("no word from the head for" in reason for reason in agent.children.reasons)
    assert session._state.next_deadline() > due + 3.0
