"""Workers that talk in one loop: real messengers, outboxes and servers over the memory network; the head is the kit."""

from __future__ import annotations

import asyncio
import threading

from rlinf_actors.errors import GroupNotFoundError
from rlinf_actors.messaging.broadcaster import Broadcaster
from rlinf_actors.messaging.cuda_ipc import LazyDevices
from rlinf_actors.messaging.messenger import Messenger
from rlinf_actors.messaging.tensor_transfer import TransferEndpoint
from rlinf_actors.model.address import WorkerAddress
from rlinf_actors.runtime.remote_group import RemoteGroup
from rlinf_actors.wire import frames
from rlinf_actors.wire.values import Endpoint, ExitReport, GroupState, WorkerState
from rlinf_actors.worker.worker_server import WorkerServer
from tests.memory_network import MemoryNetwork

WINDOW = 1 << 20


class Io:
    """The I/O thread's loop is the test's."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.tasks: set[asyncio.Task] = set()

    def submit(self, coroutine):
        task = self.loop.create_task(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def start(self, coroutine, name):
        self.submit(coroutine)

    def call(self, function, *args) -> None:
        self.loop.call_soon_threadsafe(function, *args)

    def inside(self) -> bool:
        return threading.current_thread() is threading.main_thread()


class Member:
    """One worker."""

    def __init__(self, world: World, group: str, rank: int, node: int, life: int) -> None:
        self.world, self.group, self.rank, self.node = world, group, rank, node
        self.name, self.id = f"{group}:{rank}", f"{group}-{life}-{rank}"
        self.io, self.namespace = Io(), "ns"
        self.state, self.exit = "running", None
        self.known: dict[str, RemoteGroup] = {}
        self.server = WorkerServer(world.network, self.id, self.name, "token")
        endpoint = TransferEndpoint(self.io, self.id, self.name, "host", "127.0.0.1", world.devices(self), world.paths)
        self.messenger = Messenger(self, self.connected, self.server.answer, world.window, endpoint)
        self.messages: list[frames.UserMessage] = []
        self.server.serve((frames.UserMessage,), self.arrived)
        self.server.serve((frames.Ask, frames.LaneEnded, frames.LaneKey), self.messenger.tensor_receiver.handle)
        self.server.on_link_lost(self.messenger.link_lost)
        self.messenger.when_read = self.server.unread.when_read
        self.endpoint = self.server.bind(f"ipc://{self.id}")
        self.broadcaster = Broadcaster(self.messenger, WorkerAddress(group, rank))
        self.server.serve((frames.BroadcastFailed,), self.broadcaster.told)

    def arrived(self, link, frame, parts) -> None:
        self.messages.append(frame)
        self.messenger.arrived(link, frame, parts)

    # --- what it is asked ---

    def send(self, to: str, value, **options):
        group, _, rank = to.partition(":")
        return self.messenger.send(group, int(rank), value, options.get("piggyback"), now=False)

    def recv(self, sender: str, timeout=None):
        group, _, rank = sender.partition(":")
        work = self.messenger.receive(WorkerAddress(group, int(rank)))
        if timeout is not None:
            work.limit(timeout)
        return work

    def broadcast(self, value, groups, src=None, **options):
        return self.broadcaster.broadcast(value, groups, src, **options)

    # --- its runtime ---

    async def connected(self):
        return self

    @property
    def groups(self):
        return self

    async def find(self, _namespace, name, *, ended=False):
        await asyncio.sleep(0)  # the round trip to the head
        return self.world.find(self, name, ended)

    def describe(self) -> WorkerState:
        endpoint = Endpoint("here", self.endpoint)
        return WorkerState(
            self.id, self.rank, self.node, f"10.0.0.{self.node}", self.state, 1, endpoint, exit=self.exit
        )


class World:
    """The workers, and what the head does for them. *paths*: RLINF_ACTORS_PATHS of the workers."""

    def __init__(self, window: int = WINDOW, paths: dict[str, str] | None = None) -> None:
        self.paths = paths or {}
        self.devices = lambda member: LazyDevices({})
        self.network = MemoryNetwork(asyncio.get_running_loop())
        self.window = window
        self.groups: dict[str, list[Member]] = {}
        self.remembered = True
        self.lives = 0

    def launch(self, group: str, count: int = 1, nodes: list[int] | None = None) -> list[Member]:
        self.lives += 1
        made = [Member(self, group, rank, nodes[rank] if nodes else 0, self.lives) for rank in range(count)]
        self.groups[group] = made
        return made

    @property
    def members(self) -> list[Member]:
        return [member for group in self.groups.values() for member in group]

    def find(self, asker: Member, name: str, ended: bool) -> RemoteGroup:
        workers = self.groups.get(name, [])
        alive = any(worker.state != "gone" for worker in workers)
        if not workers or not (alive or (ended and self.remembered)):
            raise GroupNotFoundError(f"no group {name!r}")
        known = asker.known.get(name)
        state = GroupState("ns", name, "m:C", "o", "running", [worker.describe() for worker in workers], "token")
        if known is None or not known.matches(state):
            names = [f"node{worker.node}" for worker in workers]
            known = RemoteGroup(self.network, asker.name, "here", "ns", name, names, soon=asker.io.call, me=asker.id)
            asker.known[name] = known
        known.adopt(state)
        return known

    def die(self, member: Member, tell: bool = True) -> None:
        """SIGKILL; *tell*: the others hear of it now."""
        member.state, member.exit = "gone", ExitReport("signalled", signal=9)
        member.server._listener.close()
        if tell:
            self.tell(member)

    def lose(self, sender: Member, receiver: Member) -> None:
        """The connection that one sends to the other by is lost, and there again."""
        self.network.reset(sender.known[receiver.group].peers[receiver.rank].link_identity)

    def tell(self, member: Member, *hearers: Member) -> None:
        """The head announces how this worker is."""
        for other in hearers or self.members:
            group = other.known.get(member.group)
            if group is not None and other.state != "gone":
                group.update([member.describe()])


async def settle() -> None:
    """Let everything that is under way in this loop come to rest."""
    for _ in range(200):
        await asyncio.sleep(0)
