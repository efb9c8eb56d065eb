"""The cost of each event at the head does not grow with the cluster; that of many events grows as their number does.

Two clusters are compared, of 40 and of 400 nodes, in two shapes: many small jobs, and one job with workers on every
node. Costs are numbers of operations (growth_kit), not seconds.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from growth_kit import instrument, operations
from head_kit import HeadKit, agent_hello, client_hello, running, specs
from msgspec.structs import replace

from rlinf_actors.head.commands import PeerUnreachable
from rlinf_actors.wire.agent_messages import (
    Beat,
    FlushLogs,
    Goodbye,
    LogCredit,
    LogLines,
    ProcessGone,
    WorkerExited,
    WorkerReady,
)
from rlinf_actors.wire.client_messages import (
    DrainNode,
    EndGroup,
    EnumerateHardware,
    FindGroup,
    GetEvents,
    GetNodes,
    Handles,
    Launch,
    StopGroup,
    WatchClients,
)
from rlinf_actors.wire.resize_messages import AddRanks, ResizeGroup
from rlinf_actors.wire.values import Endpoint, ExitReport, GroupHandle, HardwareQuestion

pytestmark = pytest.mark.model

SMALL, LARGE = 40, 400
PER_NODE = 4
"""Workers on each node of the one large job."""


class Kit(HeadKit):
    """A HeadKit that does not keep what the head writes, since that would count too."""

    def _keep(self, commands):
        return list(commands)


def ready(id: str) -> WorkerReady:
    return WorkerReady(id, 77, Endpoint("h", "ipc://x"), 0, 4000)


def question(type: str) -> HardwareQuestion:
    return HardwareQuestion(type, 1, limit_s=500.0)


def join(kit: Kit, n: int, **more) -> None:
    kit.node(f"n{n}", ip=f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}", rank=n, **more)


def many_jobs(size: int) -> Kit:
    """As many drivers as nodes, each with a job and a group of one worker that has said hello; and requests that wait.

    Each driver has a group that lost its worker with a node, drained nodes, and a lookup and a query without an
    answer.
    """
    kit = Kit()
    kit.out = []
    for n in range(size):
        join(kit, n)
        kit.driver(f"d{n}", namespace=f"ns{n}", host=f"host-n{n}")
        launch(kit, n, "g")
        kit.tell(f"a:n{n}", ready(f"g.{n}-0"))
        kit.tell(f"a:n{n}", LogLines(f"ns{n}", f"n{n}", [], 10))
        token = kit.head.jobs.token(f"ns{n}")
        me = {"role": "worker", "worker_id": f"g.{n}-0", "namespace": f"ns{n}", "host": f"host-n{n}", "token": token}
        kit.driver(f"w{n}", **me)
        kit.ask(f"d{n}", FindGroup(f"ns{n}", "later", wait_s=1000.0))
        kit.ask(f"d{n}", GetNodes(50_000, 1000.0))
        kit.ask(f"d{n}", EnumerateHardware(f"n{n}", question("Camera")))
        if n % 2:
            kit.ask(f"d{n}", DrainNode(f"n{n}", by="me"))
    kit.ask("d0", GetNodes(1, 1.0))  # computes the ranks, once after each change of the nodes
    return kit


def launch(kit: Kit, n: int, group: str):
    return kit.ask(f"d{n}", Launch(f"ns{n}", group, "m:C", specs(group, [n], f"ns{n}", f"{group}.{n}")))


def one_job(size: int) -> Kit:
    """One driver, whose one large group has workers on every node; each worker has said hello."""
    kit = Kit()
    for n in range(size):
        join(kit, n)
    kit.driver("d1", host="host-n0")
    count = PER_NODE * size
    assert kit.launch("g", [rank % size for rank in range(count)]) is not None
    token = kit.head.jobs.token("ns")
    for rank in range(count):
        kit.tell(f"a:n{rank % size}", ready(f"g-{rank}"))
        kit.driver(f"w{rank}", role="worker", worker_id=f"g-{rank}", host=f"host-n{rank % size}", token=token)
        kit.ask(f"w{rank}", FindGroup("ns", "later", wait_s=1000.0))
        kit.tell("w0", WatchClients([f"w{rank}"]))
    return kit


JOBS: dict[str, Callable[[Kit], object]] = {
    "an agent's beat": lambda kit: kit.tell("a:n8", Beat("n8-1")),
    "a client's beat": lambda kit: kit.tell("d8", Beat("d8")),
    "lines of output": lambda kit: kit.tell("a:n8", LogLines("ns8", "n8", [], 10)),
    "credit for output": lambda kit: kit.tell("d8", LogCredit("ns8", "n8", 10)),
    "logs are flushed": lambda kit: kit.ask("d8", FlushLogs("ns8", 1.0)),
    "a worker is ready": lambda kit: kit.tell("a:n8", ready("g.8-0")),
    "a worker exits": lambda kit: kit.tell("a:n10", WorkerExited("g.10-0", ExitReport("exited", 1))),
    "a group is launched": lambda kit: launch(kit, 12, "h"),
    "a group that others wait for is launched": lambda kit: launch(kit, 14, "later"),
    "a group is looked up": lambda kit: kit.ask("d12", FindGroup("ns12", "g")),
    "a missing group is looked up": lambda kit: kit.ask("d12", FindGroup("ns12", "x")),
    "a group is awaited": lambda kit: kit.ask("d12", FindGroup("ns12", "y", wait_s=5.0)),
    "a group is stopped": lambda kit: kit.ask("d16", StopGroup("ns16", "g", 1.0)),
    "a person ends a group": lambda kit: kit.ask("tool", EndGroup("ns18", "g", 1.0, by="me")),
    "a reader waits for events": lambda kit: kit.ask("d12", GetEvents(-1, namespace="ns12", wait_s=5.0)),
    "nodes are asked for": lambda kit: kit.ask("d12", GetNodes(40_000, 5.0)),
    "few nodes are asked for": lambda kit: kit.ask("d12", GetNodes(1, 5.0)),
    "hardware is asked for": lambda kit: kit.ask("d12", EnumerateHardware("n12", question("Arm"))),
    "a driver says hello": lambda kit: kit.ask("new", client_hello("new", namespace="other")),
    "a driver says hello again": lambda kit: kit.ask("d20", client_hello("d20", namespace="ns20", host="host-n20")),
    "a driver ends": lambda kit: kit.tell("d22", Goodbye("done")),
    "a driver's process ends": lambda kit: kit.tell("a:n24", ProcessGone("d24")),
    "a closed connection is found": lambda kit: kit.head.handle(PeerUnreachable(b"d24"), kit.now),
    "a worker's session ends": lambda kit: kit.tell("w26", Goodbye("done")),
    "a new agent says hello": lambda kit: kit.ask("a:new", agent_hello("new", rank=5000)),
    "an agent says hello again": lambda kit: kit.ask("a:n28", agent_hello("n28", rank=28)),
    "an agent is started anew": lambda kit: kit.ask("a:n302", agent_hello("n30", "2", rank=30)),
    "an agent has another's rank": lambda kit: kit.ask("a:other", agent_hello("other", rank=5)),
    "an agent states no rank": lambda kit: kit.ask("a:silent", agent_hello("silent")),
    "a node leaves": lambda kit: kit.tell("a:n32", Goodbye("stopped")),
    "a node is drained": lambda kit: kit.ask("d34", DrainNode("n34", by="me")),
    "a node is not drained any more": lambda kit: kit.ask("d34", DrainNode("n35", undo=True, by="me")),
    "a deadline is asked for": lambda kit: kit.head.next_deadline(),
}
"""Events of the cluster with many jobs. Each is about another node or driver, except where the order matters."""

ONE_JOB: dict[str, Callable[[Kit], object]] = {
    "an agent's beat": lambda kit: kit.tell("a:n8", Beat("n8-1")),
    "a worker is ready": lambda kit: kit.tell("a:n8", ready("g-8")),
    "a worker exits": lambda kit: kit.tell("a:n10", WorkerExited("g-10", ExitReport("exited", 1))),
    "a worker says hello again": lambda kit: kit.ask(
        "w12", client_hello("w12", role="worker", worker_id="g-12", host="host-n12", token=kit.head.jobs.token("ns"))
    ),
    "a worker's session ends": lambda kit: kit.tell("w14", Goodbye("done")),
    "lines of output": lambda kit: kit.tell("a:n8", LogLines("ns", "n8", [], 10)),
    "credit for output": lambda kit: kit.tell("d1", LogCredit("ns", "n8", 10)),
    "a group is launched": lambda kit: kit.launch("h", [20]),
    "a group is stopped": lambda kit: kit.ask("d1", StopGroup("ns", "h", 1.0)),
    "a group is awaited": lambda kit: kit.ask("w16", FindGroup("ns", "y", wait_s=5.0)),
    "an agent says hello again": lambda kit: kit.ask(
        "a:n28",
        agent_hello("n28", rank=28, workers=[running(kit.head.groups.get("ns", "g").workers["g-28"].spec, "d1")]),
    ),
    "a node leaves": lambda kit: kit.tell("a:n32", Goodbye("stopped")),
}
"""Events of the cluster with one job."""


def test_event_of_a_job_costs_the_same_however_many_readers_wait_for_events_of_others():
    kits = []
    for size in (SMALL, LARGE):
        kit = Kit()
        kit.cluster()
        kit.launch("g", [0, 0])
        for n in range(size):
            kit.ask(f"tool{n}", GetEvents(-1, namespace=f"ns{n}", wait_s=60.0))
        kit.ask("tool", GetEvents(-1, namespace="ns", wait_s=60.0))
        kits.append(instrumented(kit))
    constant("ready", lambda kit: kit.tell("a:n0", ready("g-0")), kits)
    constant("exit", lambda kit: kit.tell("a:n0", WorkerExited("g-1", ExitReport("exited", 1))), kits)


@pytest.fixture(scope="module")
def jobs() -> list[Kit]:
    return [instrumented(many_jobs(size)) for size in (SMALL, LARGE)]


@pytest.fixture(scope="module")
def job() -> list[Kit]:
    return [instrumented(one_job(size)) for size in (SMALL, LARGE)]


def instrumented(kit: Kit) -> Kit:
    assert instrument(kit.head)
    return kit


def constant(event: str, act: Callable[[Kit], object], kits: list[Kit]) -> None:
    small, large = [operations(lambda: act(kit)) for kit in kits]  # noqa: B023
    assert large <= small * 1.15 + 60, f"{event}: {small} operations at {SMALL} nodes, {large} at {LARGE}"


@pytest.mark.parametrize("event", JOBS)
def test_event_costs_the_same_however_many_nodes_and_jobs(jobs, event):
    constant(event, JOBS[event], jobs)


@pytest.mark.parametrize("event", ONE_JOB)
def test_event_costs_the_same_however_large_the_job(job, event):
    constant(event, ONE_JOB[event], job)


# --- many events: their cost grows as their number does ---


def linear(events: str, acts: list[Callable[[], object]]) -> None:
    """Assert that the second act, which has ten times as many events, costs about ten times as much as the first."""
    small, large = map(operations, acts)
    assert large <= small * LARGE / SMALL * 1.25, f"{events}: {small} operations for {SMALL}, {large} for {LARGE}"


@pytest.mark.parametrize("drivers", ["one driver", "many drivers"])
def test_cost_of_joins_is_linear_while_drivers_wait_for_the_nodes(drivers):
    def joins(size: int) -> Callable[[], object]:
        kit = Kit()
        for n in range(1 if drivers == "one driver" else size):
            kit.driver(f"d{n}", namespace=f"ns{n}")
            kit.ask(f"d{n}", GetNodes(size + n, 1000.0))  # only d0 will have enough

        def act() -> None:
            for n in range(size):
                kit.node(f"n{n}", ip=f"10.0.{n >> 8}.{n & 255}")

        return act

    linear("joins", [joins(SMALL), joins(LARGE)])


@pytest.mark.parametrize("ranks", ["stated", "a gap", "by hardware"])
def test_cost_of_joins_is_linear_while_a_request_for_nodes_lacks_one(ranks):
    def joins(size: int) -> Callable[[], object]:
        kit = Kit()
        kit.driver()
        kit.nodes(size // 2, 1000.0)

        def act() -> None:
            for n in range(size):
                rank = None if ranks == "by hardware" else n
                if ranks != "a gap" or n != 3:
                    kit.node(f"n{n}", ip=f"10.0.{n >> 8}.{n & 255}", rank=rank)

        return act

    linear("joins", [joins(SMALL), joins(LARGE)])


def test_cost_of_added_ranks_is_linear():
    def adds(size: int) -> Callable[[], object]:
        kit = Kit()
        join(kit, 0)
        kit.driver()
        assert kit.launch("g", [0] * size) is not None
        new = [replace(spec, id=f"g-{spec.rank}a1") for spec in specs("g", [0] * 2 * size)[size:]]
        instrument(kit.head)
        return lambda: [
            kit.ask("d1", AddRanks("ns", "g", new)),
            kit.ask("d1", ResizeGroup("ns", "g", "g", 2 * size, stop=False)),
        ]

    linear("added ranks", [adds(SMALL), adds(LARGE)])


def restarted(size: int, workers: int) -> tuple[Kit, list[Callable[[], object]]]:
    """A head that was restarted under one job, and the hellos of its nodes and of its driver and workers."""
    kit = HeadKit()
    for n in range(size):
        join(kit, n)
    kit.driver("d1", host="host-n0")
    assert kit.launch("g", [rank % size for rank in range(workers * size)])
    assert kit.launch("small", [0])
    records = [record for name in ("g", "small") for record in kit.head.groups.get("ns", name).workers.values()]
    for record in records:
        kit.tell(f"a:n{record.spec.node_rank}", ready(record.id))
    token = "old"  # that of `running`
    states = {name: [one.state() for one in records if one.spec.group == name] for name in ("g", "small")}
    after = Kit()
    after.disk, after.now = kit.disk, kit.now + 1
    after.start()
    handles = Handles([GroupHandle("ns", name, there) for name, there in states.items()])

    def clients() -> None:
        for record in records:
            after.driver(f"w-{record.id}", role="worker", worker_id=record.id, token=token)
            after.ask(f"w-{record.id}", FindGroup("ns", "small", wait_s=500.0))
        after.driver("d1", token=token, host="host-n0")
        after.tell("d1", handles)

    of_node = [[record for record in records if record.spec.node_rank == n] for n in range(size)]

    def nodes() -> None:
        for n in range(size):
            mine = [running(record.spec, "d1", endpoint=Endpoint("h", "ipc://x")) for record in of_node[n]]
            after.ask(f"a:n{n}", agent_hello(f"n{n}", rank=n, ip=f"10.0.{n >> 8}.{n & 255}", workers=mine))

    return after, [clients, nodes]


@pytest.mark.parametrize("first", ["the workers", "the nodes"])
def test_cost_of_a_restart_is_linear(first):
    totals = []
    for size in (SMALL, LARGE):
        kit, acts = restarted(size, 1)
        instrument(kit.head)
        totals.append(sum(map(operations, acts if first == "the workers" else acts[::-1])))
        assert kit.clients() == size + 2
        assert kit.group_states() == {"g": "running", "small": "running"}
    assert totals[1] <= totals[0] * LARGE / SMALL * 1.25
