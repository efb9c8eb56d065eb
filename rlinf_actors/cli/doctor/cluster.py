"""Asks the nodes of a cluster, through the head, for the facts that `rlinf-actors doctor` checks, and tests paths.

The paths between nodes are tested along a ring of all nodes, and from the head's node to each node; so their number
grows with that of the nodes. In a round no node takes part in two tests, because these would slow each other down. Each
test is bounded in bytes and time, and all of them in time.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rlinf_actors.cli.queries import observing
from rlinf_actors.errors import AuthenticationError, RlinfActorsError
from rlinf_actors.net.rpc import ControlClient
from rlinf_actors.runtime.progress import Facts, named, seen
from rlinf_actors.settings import Settings
from rlinf_actors.wire.check_values import CheckAnswer, CheckQuestion, Interface, NodeFacts, PathAnswer, PathTest
from rlinf_actors.wire.client_messages import Status
from rlinf_actors.wire.key_messages import GetKeys, Keys
from rlinf_actors.wire.node_questions import AskNode, answer_of
from rlinf_actors.wire.protocol import expected
from rlinf_actors.wire.values import NodeState

ANSWER_S = 25.0
"""Seconds that the head has to answer: it waits for a node for up to 20 s."""
ASKED_NODES = 32
"""Most nodes that are asked at a time."""
TEST_BYTES = 64 << 20
TEST_S = 0.3
"""Most bytes and seconds of each direction of a test."""
PATHS_S = 60.0
"""Seconds after which no further round of tests begins."""
MOST_NETWORKS = 3
"""Most networks of two nodes that are tested, beside that of their addresses at the head."""
NO_PATHS = "none was tested, because all nodes are on one machine"
CLOCK_TIMES = 3
"""Times that a node is asked for its time; the answer with the shortest round trip counts."""


@dataclass(frozen=True)
class ClockOffset:
    """How far a node's clock is ahead of this machine's, in seconds, and the greatest error of that."""

    offset_s: float
    error_s: float


@dataclass(frozen=True)
class End:
    """One end of a path: a node, and its address and interface there."""

    node: str  # hostname
    id: str
    ip: str
    interface: str = ""  # "" if the kernel chooses it, or for an IPv6 address
    mbit_s: int = 0  # speed of the interface as its driver says it, 0 if unknown


@dataclass(frozen=True)
class Path:
    """A path that was tested.

    Attributes:
        near, far: its ends: the near end has connected to the far end.
        answer: what arrived, or why no connection came about.
        there, back: whether packets to the far end, and to the near end, arrive; None if unknown. Known if they do.
    """

    near: End
    far: End
    answer: PathAnswer
    there: bool | None = None
    back: bool | None = None


@dataclass(frozen=True)
class ClusterFacts:
    """What a head and its nodes have said.

    Attributes:
        nodes: the nodes as the head sees them.
        facts: by node id.
        faults: why a node did not answer, by node id.
        clocks: by node id.
        paths: the tested paths.
        untested: why no path, or not every path, was tested, for people.
        keys: the head's list of keys, None if this user may not see it.
        here: facts about this machine, on which drivers may run.
    """

    nodes: Sequence[NodeState] = ()
    facts: dict[str, NodeFacts] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)
    clocks: dict[str, ClockOffset] = field(default_factory=dict)
    paths: Sequence[Path] = ()
    untested: str = ""
    keys: Keys | None = None
    here: NodeFacts | None = None

    def name(self, id: str) -> str:
        return next((node.report.hostname for node in self.nodes if node.report.node_id == id), id)


def ask_cluster(endpoint: str, settings: Settings, status: Status, with_paths: bool) -> ClusterFacts:
    """Ask the nodes in *status*, the answer of the head at *endpoint*, and test paths if *with_paths* is true. Blocks,
    for up to about two minutes.

    Raises:
        RlinfActorsError: the head does not answer any more.
    """
    return asyncio.run(_ask(endpoint, settings, status, with_paths))


async def _ask(endpoint: str, settings: Settings, status: Status, with_paths: bool) -> ClusterFacts:
    async with observing(endpoint, settings, look=lambda now: asking.waits(now)) as client:
        asking = Asking(client, status)
        await asking.nodes()
        order = {node.report.node_id: (node.rank, node.report.hostname) for node in status.nodes}
        facts = dict(sorted(asking.facts.items(), key=lambda one: order[one[0]]))
        untested = await asking.test_paths() if with_paths else "it was not asked for (--no-paths)"
        return ClusterFacts(
            status.nodes, facts, asking.faults, asking.clocks, asking.paths, untested, await _keys(client)
        )


async def _keys(client: ControlClient) -> Keys | None:
    try:
        return expected(await client.request(GetKeys(), ANSWER_S), Keys)
    except RlinfActorsError:  # it is for the administrator, or this cluster has no keys
        return None


class Asking:
    """The questions of one run to the nodes of a cluster."""

    def __init__(self, client: ControlClient, status: Status) -> None:
        self.facts: dict[str, NodeFacts] = {}
        self.faults: dict[str, str] = {}
        self.clocks: dict[str, ClockOffset] = {}
        self.paths: list[Path] = []
        self._client = client
        self._asked = [node for node in status.nodes if node.state != "lost" and not node.closed]
        self._to_test = 0

    def waits(self, now: Status) -> Facts:
        """Return what is waited for. *now* is the state of the cluster now."""
        if self._to_test:
            return Facts(f"testing paths between nodes: {len(self.paths)} of {self._to_test}")
        ids = {node.report.node_id for node in self._asked} - self.clocks.keys() - self.faults.keys()
        late = [seen(node) for node in now.nodes if node.report.node_id in ids]
        return Facts(
            f"asking nodes: {len(self._asked) - len(ids)} of {len(self._asked)} have answered", named("", late)
        )

    async def nodes(self) -> None:
        """Ask all nodes that are there for their facts and their time."""
        at_once = asyncio.Semaphore(ASKED_NODES)

        async def ask(node: NodeState) -> None:
            id = node.report.node_id
            async with at_once:
                try:
                    self.facts[id] = (await self._check(id, CheckQuestion(facts=True))).facts or NodeFacts("")
                    self.clocks[id] = await self._clock(id)
                except RlinfActorsError as error:
                    self.faults[id] = str(error)

        await asyncio.gather(*map(ask, self._asked))

    async def _check(self, id: str, question: CheckQuestion) -> CheckAnswer:
        return answer_of(await self._client.request(AskNode(id, question), ANSWER_S), CheckAnswer)

    async def _clock(self, id: str) -> ClockOffset:
        found = []
        for _ in range(CLOCK_TIMES):
            sent, begun = time.time(), time.monotonic()
            answer = await self._check(id, CheckQuestion())
            half_s = (time.monotonic() - begun) / 2
            found.append(ClockOffset(answer.at - sent - half_s, half_s))
        return min(found, key=lambda one: one.error_s)

    async def test_paths(self) -> str:
        """Test the paths in rounds. Return why some were not tested, "" if all were."""
        nodes = [node for node in self._asked if node.report.node_id in self.facts]
        rounds = in_rounds(ring_and_star(nodes, self.facts))
        self._to_test = sum(map(len, rounds))
        if len(nodes) > 1 and not rounds:
            return NO_PATHS
        begun = time.monotonic()
        for number, some in enumerate(rounds):
            if time.monotonic() - begun > PATHS_S:
                left = sum(map(len, rounds[number:]))
                return f"{left} of {self._to_test} paths were not tested: {PATHS_S:g} s are over"
            try:
                self.paths += await asyncio.gather(*(self._test(near, far) for near, far in some))
            except AuthenticationError as error:
                return str(error)
        return ""

    async def _test(self, near: End, far: End) -> Path:
        answer, there = await self._one_way(near, far)
        if not answer.fault:
            return Path(near, far, answer, True, True)
        if answer.kind != "timeout":
            return Path(near, far, answer)
        other, back = await self._one_way(far, near)
        return Path(near, far, answer, there, back or not other.fault)

    async def _one_way(self, near: End, far: End) -> tuple[PathAnswer, bool]:
        """Test a path. Return the outcome, and True if packets of the near end arrive at the far end."""
        bounds = {"size": TEST_BYTES, "limit_s": TEST_S}
        try:
            listening = await self._step(far.id, PathTest("listen", far.ip, **bounds))  # type: ignore[arg-type]
            if listening.fault:
                return listening, False
            test = PathTest(
                "measure", far.ip, near.ip if near.interface else "", far.id, listening.port, listening.secret,
                **bounds,  # type: ignore[arg-type]
            )  # fmt: skip
            answer = await self._step(near.id, test)
            if answer.kind != "timeout":
                return answer, not answer.fault
            return answer, (await self._step(far.id, PathTest("heard", port=listening.port))).heard
        except AuthenticationError:
            raise
        except RlinfActorsError as error:
            return PathAnswer(fault=str(error), kind="failed"), False

    async def _step(self, id: str, test: PathTest) -> PathAnswer:
        return (await self._check(id, CheckQuestion(path=test))).path or PathAnswer(
            fault="it does not say", kind="failed"
        )


# --- which paths ---


def ring_and_star(nodes: Sequence[NodeState], facts: dict[str, NodeFacts]) -> list[tuple[End, End]]:
    """Return the paths to test: along the ring of *nodes* by rank, then from the head's node to each other node.

    Two agentds on one machine have no path. Of two nodes, each network that both are in is tested.
    """
    ring = sorted(nodes, key=lambda node: (node.rank, node.report.hostname))
    pairs = list(zip(ring, [*ring[1:], *ring[:1]], strict=True))
    pairs += [(head, node) for head in ring if head.is_head for node in ring]
    seen = set[frozenset[str]]()
    found: list[tuple[End, End]] = []
    for near, far in pairs:
        ids = frozenset((near.report.node_id, far.report.node_id))
        same = near.report.ip == far.report.ip or (near.report.host and near.report.host == far.report.host)
        if len(ids) == 2 and ids not in seen and not same:
            found += _networks(near, far, facts)
        seen.add(ids)
    return found


def _networks(near: NodeState, far: NodeState, facts: dict[str, NodeFacts]) -> Iterable[tuple[End, End]]:
    ours, theirs = (facts[node.report.node_id].interfaces for node in (near, far))
    yield _end(near, near.report.ip, ours, chosen=False), _end(far, far.report.ip, theirs, chosen=True)
    both = [
        (one, other)
        for one in ours
        for other in theirs
        if other.ip not in (far.report.ip, one.ip) and _network(one) is not None and _network(one) == _network(other)
    ]
    for one, other in both[:MOST_NETWORKS]:
        yield _end(near, one.ip, ours, chosen=True), _end(far, other.ip, theirs, chosen=True)


def _end(node: NodeState, ip: str, interfaces: Sequence[Interface], chosen: bool) -> End:
    """Return an end of a path. An end that is not *chosen* connects from where the kernel's route leads."""
    found = next((one for one in interfaces if one.ip == ip), None)
    name, mbit_s = (found.name, found.mbit_s) if found is not None else ("", 0)
    return End(node.report.hostname, node.report.node_id, ip, name if chosen else "", mbit_s)


def _network(one: Interface) -> ipaddress.IPv4Network | None:
    return ipaddress.IPv4Network(f"{one.ip}/{one.prefix}", strict=False) if 0 < one.prefix < 32 else None


def in_rounds(paths: Sequence[tuple[End, End]]) -> list[list[tuple[End, End]]]:
    """Return *paths* in rounds in which each node has at most one path."""
    rounds: list[tuple[set[str], list[tuple[End, End]]]] = []
    for near, far in paths:
        ids = {near.id, far.id}
        free = next((one for one in rounds if not one[0] & ids), None)
        if free is None:
            free = (set(), [])
            rounds.append(free)
        free[0].update(ids)
        free[1].append((near, far))
    return [some for _, some in rounds]
