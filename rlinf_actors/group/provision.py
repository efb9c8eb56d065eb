"""Bring a driver's code to the nodes of a launch, and have environments built there, before the workers are launched.

`Provisioner.prepare` runs on the loop thread, as a part of the launch. For each node that needs something it launches a
CodeHost (rlinf_actors.worker.codehost), once for a job, and calls it like any worker. It then rewrites the WorkerSpecs:
each worker gets the directories of its node's copy in place of the driver's, and the environment's interpreter. The
directory is scanned again at each launch, on a thread, so changed code is picked up by the next launch.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
import weakref
from collections.abc import Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec.structs import replace

from rlinf_actors.cluster.service import launch_service
from rlinf_actors.codesync.code_scan import ChangedError, CodeSnapshot, Scanner, mib, stamp
from rlinf_actors.codesync.requirements import Requirements
from rlinf_actors.codesync.source import CodeSource
from rlinf_actors.codesync.tree import TreeError, directories_of
from rlinf_actors.errors import ConfigError, RlinfActorsError, WorkerError, WorkerStartError
from rlinf_actors.group import relays
from rlinf_actors.group.class_facts import ClassFacts, Method
from rlinf_actors.group.control import GroupControl
from rlinf_actors.group.method import CallOptions, RemoteMethod
from rlinf_actors.net.loop import Tasks
from rlinf_actors.placement.node_groups import find_group
from rlinf_actors.runtime.progress import Facts, named
from rlinf_actors.wire.client_messages import Launch
from rlinf_actors.wire.values import WorkerSpec

if TYPE_CHECKING:
    from rlinf_actors.cluster.cluster import Cluster
    from rlinf_actors.runtime.remote_group import RemoteGroup

log = logging.getLogger(__name__)

T = TypeVar("T")

HOST = "rlinf_actors.worker.codehost:CodeHost"
HOST_GROUPS = "code@"
"""Prefix of the names of the groups of CodeHosts."""
SLICE = 1 << 20
"""Bytes of files that are sent in one call."""
WINDOW = 4
"""Most calls with slices that are on their way to one node."""
CALL_S = 120.0
"""Seconds that a node may take to write one slice, or to complete a tree."""
TRIES = 5
"""How often the code is scanned again because a file changed while it was sent."""
_METHODS = ("begin", "offer", "put", "finish", "abandon", "build")
_FACTS = ClassFacts("CodeHost", {name: Method() for name in _METHODS}, frozenset(_METHODS), frozenset())


class Environs(msgspec.Struct, frozen=True):
    """What the environment of one worker is built from.

    Attributes:
        requirements: the requirements of its entry of env_configs.
        variables: the variables of that entry, such as PIP_INDEX_URL.
    """

    requirements: Requirements
    variables: tuple[tuple[str, str], ...]


class Delivery(msgspec.Struct):
    """What was sent to a node for one launch: files, bytes of their contents, and listings of directories."""

    path: str = ""
    files: int = 0
    bytes: int = 0
    listings: int = 0


class _Transfer(msgspec.Struct):
    """How far the code of a launch is on its way to one node."""

    step: str = "starts the process that takes the code"  # "" while contents are sent
    sent: int = 0  # bytes
    total: int = 0

    def text(self) -> str:
        return self.step or f"has {_of(self.sent, self.total)}"


async def launch(cluster: Cluster, message: Launch, group: RemoteGroup, environs: Mapping[int, Environs]) -> None:
    """Launch *group* by *message*, after its nodes have the driver's code and the environments that its workers need.

    If that fails, the group fails with the error. Loop thread. Raises what `Provisioner.prepare` and
    `GroupRegistry.launch` raise.
    """
    if cluster.code_source is not None or environs:
        try:
            message = await provisioner(cluster).prepare(message, environs)
        except BaseException as error:
            group.close(error if isinstance(error, Exception) else None)
            raise
    relays.use(cluster, group, message.workers)
    await cluster.runtime.groups.launch(message, group)


_provisioners: weakref.WeakKeyDictionary[Cluster, Provisioner] = weakref.WeakKeyDictionary()


def provisioner(cluster: Cluster) -> Provisioner:
    """Return the Provisioner of *cluster*, which is made when it is first needed. Loop thread."""
    found = _provisioners.get(cluster)
    if found is None:
        found = _provisioners[cluster] = Provisioner(cluster, cluster.code_source)
    return found


class Provisioner:
    """Prepares the nodes for the launches of this process. Loop thread.

    Attributes:
        deliveries: the last delivery to each node, by node rank.
    """

    def __init__(self, cluster: Cluster, source: CodeSource | None) -> None:
        self.source = source
        self.deliveries: dict[int, Delivery] = {}
        self._cluster = cluster
        self._scanner = Scanner(source) if source is not None else None
        self._scanning = asyncio.Lock()
        self._id = uuid.uuid4().hex[:6]
        self._count = 0
        self._tasks = Tasks()
        self._hosts: dict[tuple[int, str | None], asyncio.Task[GroupControl]] = {}
        self._turns: dict[int, asyncio.Lock] = {}
        self._sent: dict[int, CodeSnapshot] = {}  # by node rank: what its host has for certain
        self._transfers: dict[int, _Transfer] = {}
        self._building: list[str] = []  # environments

    async def prepare(self, message: Launch, environs: Mapping[int, Environs]) -> Launch:
        """Return *message* with specs of workers that run the driver's code of now, in their environments.

        *environs* has the ranks that run in an environment of their own.

        Raises:
            ConfigError: the driver's code cannot be sent; the text names the files.
            WorkerStartError: a node cannot take the code, or an environment cannot be built there.
        """
        nodes = sorted({spec.node_rank for spec in message.workers})
        wanted = {(spec.node_rank, spec.interpreter, environs[spec.rank]) for spec in message.workers
                  if spec.rank in environs}  # fmt: skip
        building = {key: self._build(*key) for key in wanted}
        both = _both(self._deliver_all(nodes), _all(building))
        code, interpreters = await self._cluster.runtime.progress.during(both, self._facts)
        specs = []
        for spec in message.workers:
            if spec.rank in environs:
                interpreter = interpreters[spec.node_rank, spec.interpreter, environs[spec.rank]]
                spec = replace(spec, interpreter=interpreter)
            specs.append(spec if code is None else placed(spec, code[0], code[1][spec.node_rank].path))
        return replace(message, workers=specs)

    def _facts(self) -> Facts:
        """Return how far the preparation of the nodes is."""
        transfers = list(self._transfers.values())
        parts = list(self._building)
        if self.source is not None and self._scanning.locked():
            parts.insert(0, f"reading the code in {self.source.root}")
        if transfers:
            sent, total = sum(one.sent for one in transfers), sum(one.total for one in transfers)
            where = named("", list(map(self._node, self._transfers)))
            parts.insert(0, f"sending code to {where}{f': {_of(sent, total)}' if total else ''}")
        late = [f"{self._node(node)} {one.text()}" for node, one in self._transfers.items()]
        return Facts(named("", parts) or "preparing nodes", named("", late))

    # --- hosts ---

    async def _host(self, node: int, interpreter: str | None) -> GroupControl:
        if interpreter == self._cluster.get_node_info(node).python_interpreter_path:
            interpreter = None  # the node's own: one host for code and environments
        key = (node, interpreter)
        task = self._hosts.get(key)
        if task is not None and task.done() and (task.cancelled() or task.exception() or _is_over(task.result().group)):
            task = None
            if interpreter is None:
                self._sent.pop(node, None)
        if task is None:
            self._count += 1
            name = f"{HOST_GROUPS}{self._id}-{self._count}"
            task = self._hosts[key] = self._tasks.start(
                self._launch(name, node, interpreter), f"launching {name}", expected=Exception
            )
        return await asyncio.shield(task)

    async def _launch(self, name: str, node: int, interpreter: str | None) -> GroupControl:
        cluster = self._cluster
        group = await launch_service(cluster, name, HOST, (), [node], show_logs=True, interpreter=interpreter)
        await group.ready
        return GroupControl(cluster.runtime, group, _FACTS)

    async def _call(self, host: GroupControl, name: str, *args: Any, timeout: float | None = None) -> Any:
        """Call a method of a host, and return its result. If this task is cancelled, the call is cancelled too."""
        method: RemoteMethod[..., Any] = RemoteMethod(host, name, Method(), None, CallOptions(timeout))
        result = method(*args)
        try:
            return (await result)[0]
        except asyncio.CancelledError:
            result.cancel()
            raise

    def _node(self, rank: int) -> str:
        return f"node {rank} ({self._cluster.node_name(rank)})"

    # --- environments ---

    async def _build(self, node: int, interpreter: str | None, environs: Environs) -> str:
        lines = ", ".join(environs.requirements.lines[:5])
        shown = f"building the environment with {lines} on {self._node(node)}"
        self._building.append(shown)
        try:
            host = await self._host(node, interpreter)
            started = time.monotonic()
            path, built = await self._call(host, "build", environs.requirements, dict(environs.variables))
        except RlinfActorsError as error:
            text = f"the environment with {lines} cannot be built"
            raise WorkerStartError(f"{text} on {self._node(node)}: {_cause(error)}", node=self._node(node)) from error
        finally:
            self._building.remove(shown)
        if built:
            log.info("%s built the environment of %s in %.1f s", self._node(node), path, time.monotonic() - started)
        return str(path)

    # --- code ---

    async def _deliver_all(self, nodes: Sequence[int]) -> tuple[CodeSnapshot, dict[int, Delivery]] | None:
        if self._scanner is None:
            return None
        for _ in range(TRIES):
            snapshot = await self._scan(self._scanner)
            try:
                done = await _all({node: self._deliver(node, snapshot) for node in nodes})
                self.deliveries.update(done)
                return snapshot, done
            except ChangedError as error:
                log.info("%s; the code is read again", error)
                last = error
        raise ConfigError(f"the code changes all the time: {last}", path=snapshot.source.asked_by)

    async def _scan(self, scanner: Scanner) -> CodeSnapshot:
        async with self._scanning:
            try:
                return await asyncio.get_running_loop().run_in_executor(None, _scan, scanner)
            except TreeError as error:
                assert self.source is not None
                raise ConfigError(str(error), path=self.source.asked_by) from None

    async def _deliver(self, node: int, snapshot: CodeSnapshot) -> Delivery:
        """Bring *snapshot* to a node, and return what had to be sent."""
        async with self._turns.setdefault(node, asyncio.Lock()):
            self._transfers[node] = _Transfer()
            try:
                host = await self._host(node, None)
                return await self._send(host, node, snapshot)
            except ChangedError:
                raise
            except RlinfActorsError as error:
                where = self._node(node)
                text = f"the code of {snapshot.source.root} cannot be sent to {where}: {_cause(error)}"
                raise WorkerStartError(text, node=where) from error
            finally:
                del self._transfers[node]

    async def _send(self, host: GroupControl, node: int, snapshot: CodeSnapshot) -> Delivery:
        tree, before, transfer = snapshot.tree, self._sent.get(node), self._transfers[node]
        transfer.step = "compares files"
        done = Delivery()
        known = before.tree.listings if before is not None else {}
        new = [listing for digest, listing in tree.listings.items() if digest not in known]
        done.path, missing, contents = await self._call(host, "begin", tree.root, new)
        if not done.path:
            try:
                done.listings += sum(map(len, new))
                while missing:
                    more = [tree.listings[digest] for digest in missing]
                    done.listings += sum(map(len, more))
                    _, missing, contents = await self._call(host, "offer", tree.root, more, timeout=CALL_S)
                await self._send_contents(host, node, snapshot, contents, done)
                transfer.step = "completes the copy"
                done.path = await self._call(host, "finish", tree.root, timeout=CALL_S)
            except BaseException:
                await asyncio.shield(self._abandon(host, tree.root))
                raise
            log.info(
                "sent code %s of %s to %s: %d files, %s", tree.root.hex()[:12], snapshot.source.root, self._node(node),
                done.files, mib(done.bytes),
            )  # fmt: skip
        self._sent[node] = snapshot
        return done

    async def _abandon(self, host: GroupControl, root: bytes) -> None:
        try:
            await self._call(host, "abandon", root, timeout=CALL_S)
        except RlinfActorsError as error:
            log.debug("a transfer was not given up: %s", error)  # the host gives it up by itself

    async def _send_contents(
        self,
        host: GroupControl,
        node: int,
        snapshot: CodeSnapshot,
        contents: Sequence[tuple[str, bytes]],
        done: Delivery,
    ) -> None:
        names: dict[tuple[str, bytes], str] = {}
        for name, one in snapshot.found.items():
            names[one.facts.kind, one.facts.digest] = name
        transfer = self._transfers[node]
        transfer.step = ""
        transfer.total = sum(snapshot.found[names[kind, digest]].facts.size for kind, digest in contents)
        window: list[asyncio.Task[Any]] = []
        reader = _SliceReader(snapshot, [(kind, digest, names[kind, digest]) for kind, digest in contents])
        loop = asyncio.get_running_loop()
        try:
            while slices := await loop.run_in_executor(None, reader.next):
                if len(window) == WINDOW:
                    await window.pop(0)
                put = self._call(host, "put", snapshot.tree.root, slices, timeout=CALL_S)
                window.append(self._tasks.start(put, "sending code", expected=Exception))
                done.bytes += sum(len(data) for _, _, _, data in slices)
                transfer.sent = done.bytes
            while window:
                await window.pop(0)
        finally:
            reader.close()
            for task in window:
                task.cancel()
            await asyncio.gather(*window, return_exceptions=True)
        done.files = len(contents)


class _SliceReader:
    """Reads contents of a snapshot in slices. One call at a time, on a thread."""

    def __init__(self, snapshot: CodeSnapshot, contents: Sequence[tuple[str, bytes, str]]) -> None:
        self._snapshot = snapshot
        self._left = list(reversed(contents))
        self._open: tuple[str, bytes, str, Any] | None = None
        self._offset = 0

    def next(self) -> list[tuple[str, bytes, int, bytes]]:
        """Return the next slices, of SLICE bytes together at most; [] at the end.

        Raise ChangedError if a file is not what the scan found.
        """
        slices: list[tuple[str, bytes, int, bytes]] = []
        room = SLICE
        while room > 0 and (self._open is not None or self._left):
            kind, digest, name, file = self._opened()
            try:
                data = file.read(room)
                size = self._snapshot.found[name].facts.size
                is_end = self._offset + len(data) >= size
                if self._offset + len(data) > size or (not data and not is_end):
                    raise ChangedError(f"{self._snapshot.path(name)} changed while it was sent")
                if is_end:
                    self._check(name, file)
            except OSError as error:
                raise ChangedError(f"{self._snapshot.path(name)} cannot be read any more: {error}") from None
            slices.append((kind, digest, self._offset, data))
            self._offset += len(data)
            room -= max(len(data), 256)
            if is_end:
                self.close()
        return slices

    def _opened(self) -> tuple[str, bytes, str, Any]:
        if self._open is None:
            kind, digest, name = self._left.pop()
            try:
                file = open(self._snapshot.path(name), "rb", buffering=0)  # noqa: SIM115
            except OSError as error:
                raise ChangedError(f"{self._snapshot.path(name)} cannot be read any more: {error}") from None
            self._open, self._offset = (kind, digest, name, file), 0
            self._check(name, file)
        return self._open

    def _check(self, name: str, file: Any) -> None:
        if stamp(os.fstat(file.fileno())) != self._snapshot.found[name].stamp:
            raise ChangedError(f"{self._snapshot.path(name)} changed while it was sent")

    def close(self) -> None:
        if self._open is not None:
            self._open[3].close()
            self._open = None


def _scan(scanner: Scanner) -> CodeSnapshot:
    for tries in range(TRIES):
        try:
            return scanner.scan()
        except ChangedError as error:
            if tries == TRIES - 1:
                raise TreeError(f"the code changes all the time: {error}") from None
    raise AssertionError


def placed(spec: WorkerSpec, snapshot: CodeSnapshot, path: str) -> WorkerSpec:
    """Return *spec* for a worker that runs the copy of *snapshot* in the directory *path* of its node.

    Each directory of the driver that was sent is replaced by its copy: on the import path, in PYTHONPATH, and as the
    working directory. The copy's root comes first on the import path if it is not there already.
    """
    source = snapshot.source
    directories = directories_of(snapshot.found)

    def copy(entry: str) -> str | None:
        return source.placed(entry, path, directories)

    ours = [found for entry in spec.sys_path if (found := copy(entry)) is not None]
    if path not in ours:
        ours.insert(0, path)
    env = dict(spec.env)
    if env.get("PYTHONPATH"):
        entries = (copy(os.path.normpath(entry)) or entry for entry in env["PYTHONPATH"].split(os.pathsep) if entry)
        env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(entries))
    cwd = spec.cwd
    if cwd is not None and source.holds(cwd):
        cwd = copy(cwd) or cwd
    others = [entry for entry in spec.sys_path if copy(entry) is None]
    return replace(
        spec, env=env, sys_path=(*ours, *others), cwd=cwd, code=snapshot.tree.root.hex(), code_paths=(path, *ours)
    )


def environs_of(specs: Sequence[WorkerSpec], labels: Mapping[int, str], cluster: Cluster) -> dict[int, Environs]:
    """Return what the environments of a group's workers are built from, by rank; ranks without requirements are left
    out.

    *labels* has the label of each rank's node group.
    """
    found = {}
    for spec in specs:
        group = find_group(cluster, labels[spec.rank])
        for entry in group.env_configs or ():
            if spec.node_rank in entry.node_ranks and entry.requirements:
                found[spec.rank] = Environs(entry.requirements, tuple(sorted(entry.variables.items())))
    return found


def _of(sent: int, total: int) -> str:
    return f"{mib(sent)} of {mib(total)}"


def _is_over(group: RemoteGroup) -> bool:
    return group.closing or group.gone.done() or any(peer.error is not None for peer in group.peers)


def _cause(error: BaseException) -> str:
    """Return the text of what a host raised, without its traceback."""
    if isinstance(error, WorkerError) and error.__cause__ is not None:
        return str(error.__cause__)
    return str(error)


async def _all(work: Mapping[Any, Coroutine[Any, Any, T]]) -> dict[Any, T]:
    """Run all coroutines at once, and return their results by key. At the first error, cancel the others and raise."""
    owner = Tasks()
    tasks = {key: owner.start(one, "preparing a launch", expected=Exception) for key, one in work.items()}
    try:
        for task in asyncio.as_completed(tasks.values()):
            await task
    finally:
        for one in tasks.values():
            one.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
    return {key: task.result() for key, task in tasks.items()}


async def _both(first: Coroutine[Any, Any, Any], second: Coroutine[Any, Any, Any]) -> tuple[Any, Any]:
    done = await _all({0: first, 1: second})
    return done[0], done[1]
