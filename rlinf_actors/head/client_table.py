"""Drivers and workers: who is there, which job they belong to, and how their end is noticed. Pure.

A client that an agent on its host watches (by pidfd) ends when its process ends, and only then: a
stopped driver may stay silent as long as it likes. A worker ends with what its agent has under its
id. Any other client lives by its beats.

Clients of which this head has heard, but not from. Pure.

They own workers that agents tell of, or others wait for their end. Each has a time to say hello itself, and longer
while an agent says that it watches the process.

Which agents watch the processes of which clients, and what their word is worth. Pure.

House rule: no agent's word alone ends a client. The kernel closes the connections of a process before anybody can see
its end, so what an agent says is tried on the client's own connection: if that is closed the client has ended, else it
lives by its beats, whatever that agent says. Every agent of a client's host watches it, so that one which says nothing
hides no end from the others.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rlinf_actors.head.commands import CLIENT, Emit, Notify, Refusal, Snapshot, Timing
from rlinf_actors.head.key_registry import Jobs
from rlinf_actors.head.quotas import Tombstones, label
from rlinf_actors.head.records import Client, Node
from rlinf_actors.security.members import LOCAL, Member
from rlinf_actors.wire.agent_messages import Beat, ClientHello, Goodbye, Unwatch, Watch
from rlinf_actors.wire.client_messages import ClientGone
from rlinf_actors.wire.protocol import agreed

MAX_AWAITED = 16384
"""Clients that one member may name which this head has not heard of."""
SOON_S = 4.0
"""Within so many seconds a client that lives is back at a head that was restarted: it tries every 3 s at most."""


@dataclass
class ExpectedClient:
    """One of them.

    Attributes:
        incarnation: of the client.
        by: who named it.
        until: when its time is over.
        said_gone: whether an agent said that its process has ended.
    """

    incarnation: str
    by: Member
    until: float
    said_gone: bool = False


class ExpectedClients:
    """All of them.

    Args:
        timing: the head's timers.
    """

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._strangers: dict[str, ExpectedClient] = {}
        self._named_by: Counter[str] = Counter()
        self._seen: dict[str, set[str]] = {}

    def __contains__(self, incarnation: str) -> bool:
        return incarnation in self._strangers

    def may_name(self, member: Member) -> bool:
        """Whether a member may name another one."""
        return self._named_by[label(member)] < MAX_AWAITED

    def add(self, incarnation: str, now: float, by: Member) -> None:
        """Give it `patience_s` to say hello; nothing new if it is awaited already."""
        if incarnation not in self._strangers:
            self._strangers[incarnation] = ExpectedClient(incarnation, by, now + self._timing.patience_s)
            self._named_by[label(by)] += 1

    def is_here(self, incarnation: str) -> None:
        """It has said hello."""
        self._pop(incarnation)
        self._seen.pop(incarnation, None)

    def seen(self, node_id: str, incarnation: str) -> None:
        """The agent of this node watches its process, since an earlier head asked it to."""
        self._seen.setdefault(incarnation, set()).add(node_id)

    def said_gone(self, node_id: str, incarnation: str, now: float) -> None:
        """The agent of this node says that its process has ended: it has SOON_S to say otherwise."""
        if incarnation in self._seen:
            self._unsee(incarnation, node_id)
        stranger = self._strangers.get(incarnation)
        if stranger is not None:
            stranger.until = min(stranger.until, now + SOON_S)
            stranger.said_gone = True

    def node_gone(self, node_id: str, heard: float) -> None:
        """An agent that was last heard at *heard* watches nobody any more; its clients have a lease from then on."""
        for incarnation in [i for i, nodes in self._seen.items() if node_id in nodes]:
            stranger = self._strangers.get(incarnation)
            if self._unsee(incarnation, node_id) and stranger is not None:
                stranger.until = max(stranger.until, heard + self._timing.lease_s)

    def overdue(self, now: float) -> list[ExpectedClient]:
        """Take those whose time is over, and whom no agent watches."""
        due = [one.incarnation for one in self._unwatched() if now >= one.until]
        return [one for one in map(self._pop, due) if one is not None]

    def stalled(self, seconds: float) -> None:
        """The head stood still, and heard nobody."""
        for stranger in self._strangers.values():
            stranger.until += seconds

    def next_deadline(self) -> float:
        """When somebody is overdue, infinity for never."""
        return min((one.until for one in self._unwatched()), default=math.inf)

    def _unwatched(self) -> list[ExpectedClient]:
        return [one for one in self._strangers.values() if one.incarnation not in self._seen]

    def _pop(self, incarnation: str) -> ExpectedClient | None:
        stranger = self._strangers.pop(incarnation, None)
        if stranger is not None:
            self._named_by[label(stranger.by)] -= 1
            if not self._named_by[label(stranger.by)]:
                del self._named_by[label(stranger.by)]
        return stranger

    def _unsee(self, incarnation: str, node_id: str) -> bool:
        """That node's agent does not watch it any more; whether nobody does now."""
        nodes = self._seen[incarnation]
        nodes.discard(node_id)
        if not nodes:
            del self._seen[incarnation]
        return not nodes


PING = ""
"""The `incarnation` of a Beat that asks for nothing: whoever is not connected any more shows."""
FIRST_S = 0.05
"""When a connection is tried again after the first time: its end comes by another way than the agent's word, and may be
behind that. Twice as long before each further try.
"""
LAST_S = 1.0
"""No longer than this before a try; a connection that stands even then is a living process's."""


@dataclass
class SuspectedDeath:
    client: Client
    at: float
    pause: float = FIRST_S


class ProcessWatches:
    """Asks agents to watch, and tries what they say.

    Args:
        emit: takes commands.
        on_dead: called with a client whose process has ended.
    """

    def __init__(self, emit: Emit, on_dead: Callable[[Client], None]) -> None:
        self._emit = emit
        self._on_dead = on_dead
        self._doubts: dict[bytes, SuspectedDeath] = {}

    def ask(self, client: Client, nodes: Iterable[Node]) -> None:
        """Have the agents of the client's host among *nodes* watch it, those that do not yet."""
        for node in nodes:
            if client.pid_start and node.report.host == client.host and node.id not in client.watchers:
                client.watchers[node.id] = node.peer
                self._emit(Notify(node.peer, Watch(client.incarnation, client.pid, client.pid_start)))

    def forget(self, client: Client) -> None:
        """It has ended."""
        self._doubts.pop(client.peer, None)
        for peer in client.watchers.values():
            self._emit(Notify(peer, Unwatch(client.incarnation)))

    def moved(self, client: Client) -> None:
        """It said hello over another connection: it is there."""
        self._doubts.pop(client.peer, None)

    def said_gone(self, node: Node, client: Client, now: float) -> None:
        """The agent of *node* says that a client's process has ended. Ignored of one that was not asked."""
        if client.watchers.pop(node.id, None) is not None:
            client.last_seen = now  # it may have been silent as long as it was watched
            self._doubts[client.peer] = SuspectedDeath(client, now)
            self.tick(now)

    def unreachable(self, peer: bytes) -> None:
        """Something was sent to a peer that is not connected."""
        doubt = self._doubts.pop(peer, None)
        if doubt is not None:
            self._on_dead(doubt.client)

    def tick(self, now: float) -> None:
        """Try the connections that are due."""
        for peer, doubt in [(peer, doubt) for peer, doubt in self._doubts.items() if now >= doubt.at]:
            self._emit(Notify(peer, Beat(PING)))
            doubt.at, doubt.pause = now + doubt.pause, 2 * doubt.pause
            if doubt.pause > 2 * LAST_S:
                del self._doubts[peer]

    def next_deadline(self) -> float:
        """When `tick` has something to do, infinity for never."""
        return min((doubt.at for doubt in self._doubts.values()), default=math.inf)


ROLES = ("driver", "worker")
SESSIONS = 4096
"""Of one key. The workers of a job share one: 18 nodes with 64 each are 1,152."""


class ClientTable:
    """All clients and jobs.

    Args:
        timing: the head's timers.
        emit: takes commands.
        jobs: what they belong to.
        on_gone: called with the incarnation of a client that has ended, and with the client if it was here.
        before: what an earlier head at this place knew.
    """

    def __init__(
        self,
        timing: Timing,
        emit: Emit,
        jobs: Jobs,
        on_gone: Callable[[str, Client | None], None],
        before: Snapshot,
    ) -> None:
        self._timing = timing
        self._emit = emit
        self._on_gone = on_gone
        self._clients: dict[str, Client] = {}
        self._by_peer: dict[bytes, Client] = {}
        self._by_worker: dict[str, Client] = {}
        self._below: dict[str, dict[str, Client]] = {}  # children of workers, by the worker's id
        self._jobs = jobs
        self._ended = Tombstones(CLIENT, emit, before)
        self._awaited = ExpectedClients(timing)
        self._watchers: dict[str, dict[str, None]] = {}
        self._watches = ProcessWatches(emit, lambda client: self.gone(client, "its process ended"))

    # --- looking ---

    def of_peer(self, peer: bytes) -> Client | None:
        """The living client behind *peer*."""
        return self._by_peer.get(peer)

    def get(self, incarnation: str) -> Client | None:
        """The living client of this incarnation."""
        return self._clients.get(incarnation)

    def of_worker(self, worker_id: str) -> Client | None:
        """The living client that is this worker."""
        return self._by_worker.get(worker_id)

    def below(self, worker_id: str) -> list[Client]:
        """The living clients that are children of this worker."""
        return list(self._below.get(worker_id, {}).values())

    def alive(self) -> Iterable[Client]:
        """All living clients, the oldest first."""
        return self._clients.values()

    def ended(self, incarnation: str) -> str | None:
        """Why this client has ended; None if it has not."""
        return self._ended.get(incarnation)

    def awaited(self, incarnation: str) -> bool:
        """Whether an agent says that this client owns workers, and it has not come back yet."""
        return incarnation in self._awaited

    def driver_of(self, namespace: str) -> Client | None:
        """The first driver of a job: the one whose terminal its workers' output goes to."""
        for client in self._clients.values():
            if client.role == "driver" and client.namespace == namespace:
                return client
        return None

    def token(self, namespace: str) -> str:
        """The membership token of a job; made on first use."""
        return self._jobs.token(namespace)

    # --- coming and going ---

    def hello(
        self,
        peer: bytes,
        hello: ClientHello,
        now: float,
        worker_namespace: str | None,
        member: Member = LOCAL,
    ) -> Client:
        """A driver or worker introduces itself, or says again that it is there.

        Args:
            peer: its address.
            hello: what it said.
            now: the time.
            worker_namespace: of the worker that it claims to be, or a child of; None if there is no such worker.
            member: who it is.

        Raises:
            Refusal: it has ended before, the peer is another client's, it is no member of the job, or its key has too
                many sessions.
        """
        self._check(peer, hello, worker_namespace, member)
        known = self._clients.get(hello.incarnation)
        if known is not None:
            del self._by_peer[known.peer]
            self._watches.moved(known)
            known.peer, known.last_seen, known.answered, known.member = peer, now, now, member
            known.protocol = agreed(hello.protocol, hello.newest)
            self._by_peer[peer] = known
            return known
        before = self._by_worker.get(hello.worker_id) if hello.worker_id else None
        if before is not None:
            self.gone(before, "another process says that it is this worker", certain=False)
        client = Client(
            hello.incarnation,
            hello.role,
            hello.namespace,
            hello.host,
            hello.pid,
            hello.pid_start,
            hello.worker_id,
            peer,
            now,
            member=member,
            protocol=agreed(hello.protocol, hello.newest),
            answered=now,
            parent=hello.parent,
        )
        self._clients[client.incarnation] = self._by_peer[peer] = client
        if client.parent:
            self._below.setdefault(client.parent, {})[client.incarnation] = client
        if client.worker_id:
            self._by_worker[client.worker_id] = client
        elif hello.token and client.namespace not in self._jobs:
            self._jobs.adopt(client.namespace, hello.token)  # it was welcomed by an earlier head: the job's stays
        if member.role == "driver":
            self._jobs.opened(client.namespace, member.name)
        self._awaited.is_here(client.incarnation)
        return client

    def _check(self, peer: bytes, hello: ClientHello, worker_namespace: str | None, member: Member) -> None:
        """Raises Refusal."""
        reason = self._ended.get(hello.incarnation)
        if reason is not None:
            raise Refusal("node_lost", f"the head has given up on this {hello.role}: {reason}")
        other = self._by_peer.get(peer)
        if other is not None and other.incarnation != hello.incarnation:
            raise Refusal("protocol", f"this connection is {other}'s; another client has its own")
        why_not = self.may_join(hello, worker_namespace)
        if why_not:
            raise Refusal("authentication", why_not)
        if hello.incarnation not in self._clients and member.key and self._sessions_of(member) >= SESSIONS:
            raise Refusal(
                "usage", f"{member} has {SESSIONS} sessions with the head already, as many as one key may have"
            )

    def _sessions_of(self, member: Member) -> int:
        return sum(client.member.key == member.key for client in self._clients.values())

    def may_join(self, hello: ClientHello, worker_namespace: str | None) -> str:
        """The one place that decides who is a member of a job; says why not, "" for yes.

        Without keys a driver joins by the namespace's name; whose job it is where there are keys is looked at before
        (head.authority). A worker proves with the job's token that an agent started it.
        """
        if hello.role not in ROLES:
            return f"{hello.role!r} is no role; the roles are {', '.join(ROLES)}"
        if not hello.namespace:
            return "a namespace must be named"
        if hello.role == "driver":
            return ""
        if worker_namespace is None:
            return f"worker {hello.parent or hello.worker_id!r} is not known here"
        if hello.parent and not hello.worker_id.startswith(f"{hello.parent}_"):
            return f"worker {hello.worker_id!r} is no child of worker {hello.parent!r}"
        if worker_namespace != hello.namespace or hello.token != self.token(hello.namespace):
            return f"worker {hello.worker_id!r} is no member of namespace {hello.namespace!r}"
        return ""

    def gone(self, client: Client, reason: str, certain: bool = True) -> None:
        """A client has ended: what it owns ends too. Not *certain*: it was silent, and may yet come back."""
        del self._clients[client.incarnation]
        self._by_peer.pop(client.peer, None)
        if self._by_worker.get(client.worker_id) is client:
            del self._by_worker[client.worker_id]
        siblings = self._below.get(client.parent, {})
        if siblings.pop(client.incarnation, None) is not None and not siblings:
            del self._below[client.parent]
        self._ended.add(client.incarnation, reason, certain, client.member)
        for watchers in self._watchers.values():
            watchers.pop(client.incarnation, None)
        self._tell_watchers(client.incarnation)
        self._watches.forget(client)
        self._on_gone(client.incarnation, client)

    def heard(self, peer: bytes, now: float) -> None:
        """A client said something, whatever it was."""
        self._by_peer[peer].last_seen = now

    def await_return(self, incarnation: str, now: float, by: Member) -> None:
        """An agent says that this client owns workers; it has `patience_s` to say hello itself, and as long as it likes
        if an agent still watches its process. *by*: who says so, or wants to hear of its end.
        """
        if incarnation in self._clients:
            return
        if self._ended.get(incarnation) is not None:
            self._on_gone(incarnation, None)
            return
        self._awaited.add(incarnation, now, by)

    def seen(self, node_id: str, incarnations: Iterable[str]) -> None:
        """The agent of this node watches the processes of these clients, since an earlier head asked it to."""
        for incarnation in incarnations:
            if incarnation not in self._clients and self._ended.get(incarnation) is None:
                self._awaited.seen(node_id, incarnation)

    def process_ended(self, node: Node, incarnation: str, now: float) -> None:
        """The agent of *node* says that a process has ended. One that this head does not know yet may say otherwise, by
        a hello soon after, or another agent by its own.
        """
        client = self._clients.get(incarnation)
        if client is not None:
            self._watches.said_gone(node, client, now)
            return
        if self._awaited.may_name(node.member):
            self.await_return(incarnation, now, node.member)
        self._awaited.said_gone(node.id, incarnation, now)

    def unreachable(self, peer: bytes) -> None:
        """Something was sent to a peer that is not connected."""
        self._watches.unreachable(peer)

    def forget_job(self, namespace: str) -> bool:
        """Forget a job if it has no members; the caller knows that it has no groups."""
        if any(client.namespace == namespace for client in self._clients.values()):
            return False
        self._jobs.forget(namespace)
        return True

    # --- watching ---

    def watch(self, client: Client, nodes: Iterable[Node]) -> None:
        """Have a client watched by the agents of its host, where there are any."""
        self._watches.ask(client, nodes)

    def watch_all(self, node: Node) -> None:
        """Have an agent that is here watch every client on its host."""
        for client in self._clients.values():
            self._watches.ask(client, [node])

    def subscribe(self, client: Client, incarnations: Sequence[str], now: float) -> None:
        """*client* wants to hear of the ends of these clients of its namespace.

        Of those that are not known here, beyond what it may name, it hears at once: nobody else would end its wait.
        """
        for incarnation in incarnations:
            watched = self._clients.get(incarnation)
            if watched is not None and watched.namespace != client.namespace:
                continue
            known = watched is not None or incarnation in self._awaited or self._ended.get(incarnation) is not None
            if not known and not self._awaited.may_name(client.member):
                self._emit(Notify(client.peer, ClientGone(incarnation)))
                continue
            self._watchers.setdefault(incarnation, {})[client.incarnation] = None
            if self._ended.get(incarnation) is not None:
                self._tell_watchers(incarnation)
            elif watched is None:
                self.await_return(incarnation, now, client.member)

    def _tell_watchers(self, incarnation: str) -> None:
        for watcher in self._watchers.pop(incarnation, {}):
            client = self._clients.get(watcher)
            if client is not None:
                self._emit(Notify(client.peer, ClientGone(incarnation)))

    def unwatch(self, node_id: str, heard: float) -> None:
        """An agent is gone, or begins anew: the clients that it watched live by their beats from now on.

        Args:
            node_id: of the agent's node.
            heard: when that node was last heard of, and so its clients, who may be silent as long as they are watched.
        """
        for client in self._clients.values():
            if client.watchers.pop(node_id, None) is not None and not client.watchers:
                client.last_seen = max(client.last_seen, heard)
        self._awaited.node_gone(node_id, heard)

    def tick(self, now: float) -> None:
        """Time has passed: who does not beat and is not watched has ended."""
        self._watches.tick(now)
        for client in [c for c in self._clients.values() if now >= self._expiry(c)]:
            reason = f"it was silent for {now - client.last_seen:.0f} s"
            self._emit(Notify(client.peer, given_up(reason)))
            self.gone(client, reason, certain=False)
        for stranger in self._awaited.overdue(now):
            reason = "its process ended" if stranger.said_gone else "it did not return after the head was restarted"
            self._ended.add(stranger.incarnation, reason, stranger.said_gone, stranger.by)
            self._tell_watchers(stranger.incarnation)
            self._on_gone(stranger.incarnation, None)

    def stalled(self, seconds: float, now: float) -> None:
        """The head stood still: nobody was silent."""
        for client in self._clients.values():
            client.last_seen = self._timing.after_stall(client.last_seen, seconds, now)
            client.answered = min(now, client.answered + seconds)
        self._awaited.stalled(seconds)

    def next_deadline(self) -> float:
        """When `tick` has something to do, infinity for never."""
        others = self._watches.next_deadline(), self._awaited.next_deadline()
        return min([*others, *map(self._expiry, self._clients.values())])

    def _expiry(self, client: Client) -> float:
        """When its silence ends it. A worker's end is its agent's to tell, or its node's."""
        watched = client.watchers or client.role == "worker"
        return math.inf if watched else client.last_seen + self._timing.lease_s


def given_up(reason: str) -> Goodbye:
    """What a client is told that this head has given up on."""
    return Goodbye(f"the head has given up on this process: {reason}", lost=True)
