"""Workers that start children which are members, in every way that a process is started."""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

from rlinf_actors import Channel, Cluster, RlinfActorsError, Worker
from rlinf_actors.channel.request_sender import RequestSender
from rlinf_actors.model.address import WorkerAddress
from rlinf_actors.wire import frames

WAYS = ("fork", "spawn", "os.fork", "subprocess", "grandchild")


class Member(Worker):
    """A child: does what comes through a pipe, one step after the other."""

    def __init__(self, parent: WorkerAddress, siblings: int, rank: int) -> None:
        super().__init__(parent_address=parent, world_size=siblings, rank=rank)

    def swap(self, value: Any, group: str, rank: Any) -> Any:
        """Send, and receive what the other sends."""
        sent = self.send((self.get_name(), value), group, rank, async_op=True)
        got = self.recv(group, rank, timeout=60)
        sent.wait(60)
        return got

    def hear(self, group: str, rank: Any, timeout: float = 60) -> Any:
        return self.recv(group, rank, timeout=timeout)

    def say(self, value: Any, group: str, rank: Any) -> None:
        self.send(value, group, rank)

    def give(self, value: Any, groups: Any) -> Any:
        return self.broadcast(value, groups=groups, async_op=True).wait(60)

    def put(self, name: str, item: Any) -> None:
        self.connect_channel(name).put(item, timeout=60)

    def get(self, name: str) -> Any:
        return self.connect_channel(name).get(timeout=60)

    def begin_all(self, value: Any, to: list[Any], name: str) -> None:
        """Send to those that it has never talked to, and put by a handle that has not found its channel, and wait for
        nothing.
        """
        handle = copy.copy(self.connect_channel(name))  # as one that came as an argument
        for group, rank in to:
            self.send(value, group, rank, async_op=True)
        handle.put(value, async_op=True)

    def get_and_die(self, name: str) -> None:
        """Take an item, and end before the acknowledgement is sent."""
        channel = self.connect_channel(name)
        RequestSender.acknowledge = lambda sender, call: None
        channel.get(timeout=60)
        os.kill(os.getpid(), signal.SIGKILL)

    def facts(self) -> dict[str, Any]:
        proxy = self.manager_proxy
        return {
            "name": self.get_name(),
            "current": Worker.current_worker is self,
            "info": str(self.worker_info.address),
            "parent alive": self.check_worker_alive(str(self.worker_address.get_parent_address())),
            "parent's node": proxy.get_worker_info(self.worker_address.get_parent_address()).cluster_node_rank,
            "nodes": Cluster().num_nodes,
            "hardware": self.hardware_infos,
        }

    def refusals(self) -> list[str]:
        tries: list[Callable[[], Any]] = [
            lambda: self.device_lock.acquire(),
            lambda: self.keep_for_stop(os.getpid()),
            lambda: self.check_worker_alive(self.get_name()),
            lambda: Member(self.worker_address.get_parent_address(), 2, 1),
        ]
        return [_error(one) for one in tries]

    def have_child(self, rank: int, group: str, to: int) -> None:
        if os.fork():
            os.wait()
            return
        try:
            me = Worker(parent_address=self.worker_address, world_size=1, rank=rank)
            me.send(f"from {me.get_name()}", group, to)
            me.recv(group, to, timeout=60)
        finally:
            os._exit(0)

    def make_channel(self, name: str) -> None:
        self.channel = self.create_channel(name)
        self.channel.put("made by a child")

    def end(self, code: int) -> None:
        os._exit(code)


def _error(call: Callable[[], Any]) -> str:
    try:
        call()
    except RlinfActorsError as error:
        return f"{type(error).__name__}: {error}"
    return "went through"


def run(parent: WorkerAddress, siblings: int, rank: int, orders: int, answers: int) -> None:
    """Be that child, and do what is asked. Ends when nobody asks any more."""
    with open(orders) as asked, open(answers, "w") as said:

        def answer(call: Callable[[], Any]) -> None:
            try:
                outcome = {"ok": call()}
            except Exception as error:  # noqa: BLE001 - it reaches the test
                outcome = {"error": type(error).__name__, "text": str(error), "trace": traceback.format_exc()}
            said.write(json.dumps(outcome) + "\n")
            said.flush()

        members: list[Member] = []
        answer(lambda: members.append(Member(parent, siblings, rank)))
        for line in asked:
            method, args = json.loads(line)
            if not method:
                return
            answer(partial(getattr(members[0], method), *args))


def run_with(connection: Any, parent: WorkerAddress, siblings: int, rank: int) -> None:
    """The same in a spawned process, which gets its pipes through another one."""
    from multiprocessing.reduction import recv_handle

    run(parent, siblings, rank, recv_handle(connection), recv_handle(connection))


def run_below(connection: Any, parent: WorkerAddress, siblings: int, rank: int) -> None:
    """The same in a process below this one, which is no member: as vLLM's engine core does it."""
    process = multiprocessing.get_context("spawn").Process(target=run_with, args=(connection, parent, siblings, rank))
    process.start()
    process.join()


class Child:
    """One child, as its worker has it."""

    def __init__(self, way: str, parent: WorkerAddress, siblings: int, rank: int) -> None:
        asked, self._orders = os.pipe()
        self._answers, said = os.pipe()
        self.process: Any = None
        if way == "fork":
            self.process = multiprocessing.get_context("fork").Process(
                target=run, args=(parent, siblings, rank, asked, said), daemon=True
            )
            self.process.start()
            self.pid = self.process.pid
        elif way in ("spawn", "grandchild"):
            from multiprocessing.reduction import send_handle

            context = multiprocessing.get_context("spawn")
            ours, theirs = context.Pipe()
            target = run_with if way == "spawn" else run_below
            self.process = context.Process(target=target, args=(theirs, parent, siblings, rank))
            self.process.start()
            self.pid = self.process.pid
            for fd in (asked, said):
                send_handle(ours, fd, self.pid)
        elif way == "os.fork":
            self.pid = os.fork()
            if not self.pid:
                try:
                    run(parent, siblings, rank, asked, said)
                finally:
                    os._exit(0)
        else:
            address = f"c.WorkerAddress.from_name({str(parent)!r})"
            code = f"import child_workers as c; c.run({address}, {siblings}, {rank}, {asked}, {said})"
            env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
            self.process = subprocess.Popen([sys.executable, "-c", code], pass_fds=(asked, said), env=env)
            self.pid = self.process.pid
        os.close(asked)
        os.close(said)
        self._reader = open(self._answers)  # noqa: SIM115
        self.start(None)

    def start(self, method: str | None, *args: Any) -> None:
        if method is not None:
            os.write(self._orders, (json.dumps([method, args]) + "\n").encode())

    def no_more(self) -> None:
        os.write(self._orders, b'["", []]\n')

    def result(self) -> Any:
        line = self._reader.readline()
        if not line:
            return "it ended"
        outcome = json.loads(line)
        if "error" in outcome:
            print(outcome["trace"], file=sys.stderr)
            return f"{outcome['error']}: {outcome['text']}"
        return outcome["ok"]


class AsyncParent(Worker):
    """Forks within its event loop."""

    async def swap_by_a_child(self, value: Any) -> list[Any]:
        child = Child("fork", self.worker_address, 1, 0)
        made = child.result()
        child.start("swap", value, self._group_name, self._rank)
        sent = self.send("from its worker", self._group_name, (self._rank, 0), async_op=True)
        got = await self.recv(self._group_name, (self._rank, 0), async_op=True)
        await sent
        return [made, got, child.result()]


class Parent(Worker):
    """Has children, and does itself what they do."""

    def __init__(self) -> None:
        super().__init__()
        self.children: dict[int, Child] = {}

    def pid(self) -> int:
        return os.getpid()

    def start(self, ways: list[str]) -> list[Any]:
        """Start a child in each of these ways; None for each that is a member now."""
        for rank, way in enumerate(ways):
            self.children[rank] = Child(way, self.worker_address, len(ways), rank)
        return [self.children[rank].result() for rank in range(len(ways))]

    def again(self, rank: int, way: str, siblings: int) -> Any:
        self.children[rank] = Child(way, self.worker_address, siblings, rank)
        return self.children[rank].result()

    def last_words(self, way: str, count: int, group: str, to: int, channel: str) -> int:
        """Have a child send, take an item, and end at once."""
        child = Child(way, self.worker_address, 1, 0)
        child.result()
        for number in range(count):
            child.start("say", number, group, to)
        child.start("get", channel)
        child.no_more()
        child.process.wait() if way == "subprocess" else child.process.join()
        return child.process.returncode if way == "subprocess" else child.process.exitcode

    def last_begun(self, way: str, *args: Any) -> None:
        """Have a second child begin something and end at once."""
        child = Child(way, self.worker_address, 2, 1)
        child.result()
        child.start("begin_all", *args)
        child.no_more()
        child.process.wait() if way == "subprocess" else child.process.join()

    def hear_many(self, count: int, group: str, rank: Any) -> list[Any]:
        return [self.recv(group, rank, timeout=60) for _ in range(count)]

    def children_socket(self) -> str:
        return os.environ["RLINF_ACTORS_CHILDREN"]

    def let_stranger(self, script: str, socket: str) -> Any:
        done = subprocess.run([sys.executable, "-c", script, socket], capture_output=True, text=True, check=True)
        return json.loads(done.stdout)

    def inherited(self, channel: Channel) -> list[Any]:
        """What forked children do with a handle of their worker: one that is a member, and one that is none."""
        channel.put("before the fork")
        got = []
        for rank in range(2):
            reader, writer = os.pipe()
            if not os.fork():
                if rank == 0:
                    Worker(parent_address=self.worker_address, world_size=1, rank=rank)
                os.write(writer, json.dumps(_error(lambda: channel.put("in a child"))).encode())
                os._exit(0)
            os.close(writer)
            with open(reader) as said:
                got.append(json.loads(said.read()))
            os.wait()
        channel.put("after the fork")
        return got

    def child_of(self, name: str) -> Any:
        return Child("fork", WorkerAddress.from_name(name), 1, 0).result()

    def pids(self) -> list[int]:
        return [child.pid for child in self.children.values()]

    def let(self, rank: int, method: str, *args: Any) -> Any:
        """What a method of a child gives."""
        self.children[rank].start(method, *args)
        return self.children[rank].result()

    def begin(self, rank: int, method: str, *args: Any) -> None:
        self.children[rank].start(method, *args)

    def finish(self, rank: int) -> Any:
        return self.children[rank].result()

    def kill(self, rank: int) -> None:
        os.kill(self.children[rank].pid, signal.SIGKILL)

    def swap(self, value: Any, group: str, rank: Any) -> Any:
        sent = self.send((self.get_name(), value), group, rank, async_op=True)
        got = self.recv(group, rank, timeout=60)
        sent.wait(60)
        return got

    def hear(self, group: str, rank: Any) -> Any:
        return self.recv(group, rank, timeout=60)

    def say(self, value: Any, group: str, rank: Any) -> None:
        self.send(value, group, rank)

    def give(self, value: Any, groups: Any) -> Any:
        return self.broadcast(value, groups=groups, async_op=True).wait(60)

    def hear_end(self, group: str, rank: Any) -> str:
        return _error(lambda: self.recv(group, rank, timeout=60))

    def call_child(self, group: str, path: Any) -> str:
        """Call a method of a child, and return what it answers."""
        answered: queue.SimpleQueue[str] = queue.SimpleQueue()

        class Answer:
            def answer(self, frame: Any, parts: Any) -> bool:
                answered.put(f"{frame.error}: {frame.text}")
                return True

            def fail(self, error: Exception) -> None:
                answered.put(str(error))

        def found(peer: Any) -> None:
            peer.send(frames.Call(peer.open(Answer()), "pid"))

        self._context.messenger.directory.peer(WorkerAddress(group, path), found)
        return answered.get(timeout=60)

    def say_end(self, group: str, rank: Any) -> str:
        return _error(lambda: self.send("late", group, rank))

    def give_end(self, groups: Any) -> str:
        return _error(lambda: self.broadcast("late", groups=groups))
