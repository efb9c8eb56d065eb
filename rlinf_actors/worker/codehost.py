"""CodeHost: the worker class of the processes that receive a driver's code on a node, and build environments there.

The process that launches groups (rlinf_actors.group.provision) launches a CodeHost on each node that needs one, as a
group of its own, before it launches the group whose workers run the code. So code travels on the job's own connections,
which only members of the job can open, and belongs to the user of the job's workers. Neither the head nor agentd sees
it. The host ends with its job; the kernel then releases its locks.

Disk and hashing run on threads; the methods run on the main thread's event loop.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from rlinf_actors.codesync.code_store import CodeStore, KeptTree
from rlinf_actors.codesync.environments import Base, Build, Environment, EnvironmentStore, Recipe
from rlinf_actors.codesync.places import Places
from rlinf_actors.codesync.receiving import Receiving, receive
from rlinf_actors.codesync.requirements import Requirements
from rlinf_actors.codesync.tree import TreeError
from rlinf_actors.net.loop import Tasks
from rlinf_actors.worker.worker import Worker

T = TypeVar("T")

SILENT_S = 60.0
"""Seconds without a slice after which a host gives up a transfer, so that another sender can begin."""
PINNED = 4
"""Number of trees that a host keeps from being removed, beside those that running workers use."""

_threads = ThreadPoolExecutor(64, "code")  # more than asyncio's own: some wait long for a lock

Slice = tuple[str, bytes, int, bytes]
"""Kind and hash of a content, the offset of the slice, and its bytes."""
Needed = tuple[str, list[bytes], list[tuple[str, bytes]]]
"""The directory of a tree, "" if the node does not have it; then what the node needs: hashes of listings, or kinds and
hashes of contents.
"""


class CodeHost(Worker):
    """Receives trees of code for the node's store, and builds environments. One process of a job on a node."""

    def __init__(self) -> None:
        super().__init__()
        places = Places.load()
        self._code = CodeStore(places)
        self._environments = EnvironmentStore(places)
        self._transfers: dict[bytes, _Transfer] = {}
        self._trees: OrderedDict[bytes, KeptTree] = OrderedDict()
        self._built: dict[str, Environment] = {}

    async def begin(self, root: bytes, listings: Sequence[bytes]) -> Needed:
        """Begin to receive the tree with the hash *root*, unless the node has it, and return what the node needs.

        Waits while another process receives the same tree. *listings* are those that the sender expects to be new.

        Raises:
            TreeError: the tree breaks a rule, is too large, or does not fit on the disk.
        """
        found = await _on_thread(lambda: self._acquire(root), _discard)
        if isinstance(found, KeptTree):
            return self._pin(found), [], []
        transfer = _Transfer(found, self._dropped)
        self._transfers[root] = transfer
        return await self.offer(root, listings)

    async def offer(self, root: bytes, listings: Sequence[bytes]) -> Needed:
        """Add more listings of a tree that is being received, and return what the node still needs."""
        transfer = self._transfer(root)
        missing, contents = await transfer.run(lambda: transfer.receiving.offer(listings))
        return "", missing, contents

    async def put(self, root: bytes, slices: Sequence[Slice]) -> None:
        """Write slices of contents that the node needs, in order."""
        transfer = self._transfer(root)

        def put() -> None:
            for kind, digest, offset, data in slices:
                transfer.receiving.put(kind, digest, offset, data)

        await transfer.run(put)

    async def finish(self, root: bytes) -> str:
        """Complete a tree whose contents have all arrived, and return its directory."""
        transfer = self._transfer(root)
        tree = await transfer.run(transfer.receiving.finish)
        transfer.end()
        path = self._pin(tree)
        await _on_thread(self._code.trim)
        return path

    async def abandon(self, root: bytes) -> None:
        """Give up a transfer, because the sender cannot go on."""
        if root in self._transfers:
            await self._transfers[root].abandon()

    async def build(self, requirements: Requirements, variables: Mapping[str, str]) -> tuple[str, bool]:
        """Return the interpreter of an environment with *requirements*, and True if it had to be built.

        The environment is made from this worker's own interpreter. Waits while another process builds the same one.
        *variables* override those of the node during the build. If the call is cancelled, the build is ended.

        Raises:
            EnvironmentBuildError: pip or uv failed; the text has its last lines.
        """
        recipe = await _on_thread(lambda: Recipe.of(requirements, {**os.environ, **variables}, Base.own()))
        if recipe.name in self._built:
            return self._built[recipe.name].interpreter, False
        build = Build(_say)
        try:
            made = await _on_thread(lambda: self._environments.acquire(recipe, build), lambda one: one.release())
        except asyncio.CancelledError:
            build.cancel("its launch was cancelled")
            raise
        if recipe.name in self._built:  # a concurrent call for the same
            made.release()
        else:
            self._built[recipe.name] = made
        await _on_thread(self._environments.trim)
        return made.interpreter, made.built

    def _acquire(self, root: bytes) -> KeptTree | Receiving:
        self._code.open()
        return receive(self._code, root)

    def _pin(self, tree: KeptTree) -> str:
        """Keep *tree* for later launches of this job, and give up the tree that was used longest ago."""
        before = self._trees.pop(tree.root, None)
        if before is not None:
            before.release()
        self._trees[tree.root] = tree
        if len(self._trees) > PINNED:
            self._trees.popitem(last=False)[1].release()
        return tree.path

    def _transfer(self, root: bytes) -> _Transfer:
        if root not in self._transfers:
            raise TreeError(f"no transfer of tree {root.hex()[:12]} is going on: it was silent for {SILENT_S:g} s")
        return self._transfers[root]

    def _dropped(self, transfer: _Transfer) -> None:
        self._transfers.pop(transfer.receiving.root, None)


class _Transfer:
    """One tree on its way. Its operations run one at a time, in the order of the calls. If no call comes for SILENT_S,
    or an operation fails, the transfer ends.
    """

    def __init__(self, receiving: Receiving, on_end: Callable[[_Transfer], object]) -> None:
        self.receiving = receiving
        self._on_end = on_end
        self._turn = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._over = False
        self._timer = self._loop.call_later(SILENT_S, self._silent)
        self._tasks = Tasks()

    async def run(self, operation: Callable[[], T]) -> T:
        self._timer.cancel()
        try:
            async with self._turn:
                if self._over:
                    raise TreeError("this transfer has ended")
                done = self._loop.run_in_executor(_threads, operation)
                try:
                    return await asyncio.shield(done)
                finally:
                    if not done.done():  # cancelled: the thread goes on, and the turn must last as long
                        await asyncio.wait([done])
        except BaseException:
            await self.abandon()
            raise
        finally:
            if not self._over:
                self._timer.cancel()
                self._timer = self._loop.call_later(SILENT_S, self._silent)

    def end(self) -> None:
        self._over = True
        self._timer.cancel()
        self._on_end(self)

    async def abandon(self) -> None:
        async with self._turn:
            if not self._over:
                self.end()
                await self._loop.run_in_executor(_threads, self.receiving.abandon)

    def _silent(self) -> None:
        self._tasks.start(self.abandon(), "giving up a transfer that is silent")


def _discard(found: KeptTree | Receiving) -> None:
    if isinstance(found, KeptTree):
        found.release()
    else:
        found.abandon()


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")  # it reaches the driver's terminal as any worker's output does
    sys.stdout.flush()


async def _on_thread(operation: Callable[[], T], undo: Callable[[T], object] | None = None) -> T:
    """Run *operation* on a thread and return its result. If this task is cancelled, *undo* gets the later result."""
    running = asyncio.get_running_loop().run_in_executor(_threads, operation)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        if undo is not None:

            def ended(future: asyncio.Future[T]) -> None:
                if not future.cancelled() and future.exception() is None:
                    undo(future.result())

            running.add_done_callback(ended)
        raise
