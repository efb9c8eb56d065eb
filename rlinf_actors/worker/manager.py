"""Looking up other workers of the job from inside a worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlinf_actors.cluster.attach import worker_job
from rlinf_actors.errors import GroupNotFoundError
from rlinf_actors.model.address import WorkerAddress
from rlinf_actors.model.worker import WorkerInfo

if TYPE_CHECKING:
    from rlinf_actors.wire.values import GroupState, WorkerState
    from rlinf_actors.worker.context import WorkerContext


class ManagerProxy:
    """What the head knows of the workers of this job. Every method is one round trip; any thread but the I/O thread."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context

    def get_worker_info(self, address: WorkerAddress | str) -> WorkerInfo:
        """Where a worker of this job runs.

        Raises:
            GroupNotFoundError: no such group or rank is running.
        """
        address = WorkerAddress.from_name(address) if isinstance(address, str) else address
        group, worker = self._find(address)
        if worker is None or group is None:
            raise GroupNotFoundError(
                f"no worker {address.get_name()!r} is running in namespace {self._context.spec.namespace!r}"
            )
        return WorkerInfo(
            address=address,
            rank=worker.rank,
            group_world_size=len(group.workers),
            cluster_node_rank=worker.node_rank,
            node_ip=worker.node_ip,
            node_port=worker.port,
        )

    def is_alive(self, name: str) -> bool:
        """Whether the worker called *name* is running."""
        _, worker = self._find(WorkerAddress.from_name(name))
        return worker is not None and worker.state in ("starting", "running")

    def _find(self, address: WorkerAddress) -> tuple[GroupState | None, WorkerState | None]:
        job = worker_job()
        assert job is not None, "a worker process has its job before the user's class is constructed"
        runtime = job.connect()
        # the request itself ends with a ClusterTimeoutError when the head does not answer
        status = runtime.io.submit(runtime.status(self._context.spec.namespace)).result()
        for group in status.groups:
            if group.name == address.root_group_name:
                for worker in group.workers:
                    if worker.rank == address.rank:
                        return group, worker
        return None, None
