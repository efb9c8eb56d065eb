"""ManagerProxy finds other workers of the job. `Worker.manager_proxy` returns one."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from rlinf_actors.cluster.cluster import Cluster
from rlinf_actors.cluster.connect import worker_job
from rlinf_actors.errors import GroupNotFoundError, UsageError
from rlinf_actors.model.address import WorkerAddress, WorkerInfo
from rlinf_actors.runtime.future import AsyncWork

if TYPE_CHECKING:
    from rlinf_actors.runtime.runtime import Runtime
    from rlinf_actors.wire.launch_messages import FoundWorker
    from rlinf_actors.worker.context import WorkerContext

T = TypeVar("T")


class ManagerProxy:
    """Finds other workers of this job. Each method asks the head once. Any thread but the I/O thread.

    With ``async_op=True`` a method returns an AsyncWork at once; otherwise it blocks. Every method raises
    ClusterTimeoutError if the head does not answer within 10 s, or 30 s if this worker has not used the head before.
    """

    def __init__(self, context: WorkerContext) -> None:
        self._context = context

    @overload
    def get_worker_info(self, address: WorkerAddress | str, async_op: Literal[False] = False) -> WorkerInfo: ...

    @overload
    def get_worker_info(self, address: WorkerAddress | str, async_op: Literal[True]) -> AsyncWork[WorkerInfo]: ...

    def get_worker_info(
        self, address: WorkerAddress | str, async_op: bool = False
    ) -> WorkerInfo | AsyncWork[WorkerInfo]:
        """Return rank, node and port of a worker of this job.

        Args:
            address: address of the worker, or its name (``group:rank``).
            async_op: return an AsyncWork of the result.

        Raises:
            GroupNotFoundError: no such group or rank is running.
            UsageError: *address* is that of a child of a worker.
        """
        address = WorkerAddress.from_name(address) if isinstance(address, str) else address
        work = self._asking(self._info(address), f"get_worker_info({address.get_name()!r})")
        return work if async_op else work.wait()

    @overload
    def is_alive(self, name: str, async_op: Literal[False] = False) -> bool: ...

    @overload
    def is_alive(self, name: str, async_op: Literal[True]) -> AsyncWork[bool]: ...

    def is_alive(self, name: str, async_op: bool = False) -> bool | AsyncWork[bool]:
        """Return True if the worker is starting or running.

        Args:
            name: name of the worker, ``group:rank``.
            async_op: return an AsyncWork of the result.

        Raises:
            UsageError: *name* is that of a child of a worker.
        """
        work = is_alive(name)
        return work if async_op else work.wait()

    def _asking(self, coroutine: Coroutine[Any, Any, T], what: str) -> AsyncWork[T]:
        return AsyncWork.of(self._context.runtime.io, coroutine, what)

    async def _info(self, address: WorkerAddress) -> WorkerInfo:
        job = worker_job()
        assert job is not None, "a worker process has its job before the user's class is constructed"
        found = await _find(await job.connected(), address)
        worker = found.worker
        if worker is None:
            raise GroupNotFoundError(
                f"no worker {address.get_name()!r} is running in job {self._context.spec.namespace!r}"
            )
        return WorkerInfo(
            address=address,
            rank=worker.rank,
            group_world_size=found.world_size,
            cluster_node_rank=worker.node_rank,
            node_ip=worker.node_ip,
            node_port=worker.port,
            code_hash=worker.code,
        )


def is_alive(name: str) -> AsyncWork[bool]:
    """Ask the head whether the worker *name* of this process's job is starting or running. Any thread.

    Raises:
        UsageError: *name* is that of a child of a worker, or this process has no Cluster.
    """
    address, job = WorkerAddress.from_name(name), worker_job()
    runtime = Cluster.current().runtime if job is None else job.runtime
    runtime.check_usable()

    async def ask() -> bool:
        worker = (await _find(runtime if job is None else await job.connected(), address)).worker
        return worker is not None and worker.state in ("starting", "running")

    return AsyncWork.of(runtime.io, ask(), f"is_alive({name!r})")


async def _find(runtime: Runtime, address: WorkerAddress) -> FoundWorker:
    if len(address.rank_path) > 1:
        raise UsageError(f"{address} is a child of a worker, and the head knows workers only: ask its worker")
    return await runtime.find_worker(address.root_group_name, address.rank)
