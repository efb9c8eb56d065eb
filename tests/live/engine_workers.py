"""Workers in the manner of those of RLinf that use torch's process groups: FSDP, Megatron, vLLM and SGLang.

Each reads the variables, and calls the methods of Worker, that the real one does around init_process_group. Models are
tiny and on the CPU. docs/how-to/rlinf.md has the list.
"""

from __future__ import annotations

import multiprocessing
import os
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from rlinf_actors import Worker, WorkerAddress

TIMEOUT = timedelta(seconds=60)
WIDTH = 8


VARIABLES = (
    "MASTER_ADDR MASTER_PORT RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK CLUSTER_NODE_RANK NODE_LOCAL_RANK "
    "NODE_LOCAL_WORLD_SIZE GLOO_SOCKET_IFNAME"
)
"""Variables that RLinf's training workers, engines and torch read."""
ATTRIBUTES = (
    "_rank _world_size _group_name _logger _cluster_node_rank _manager_proxy _timer_metrics accelerator_type "
    "device_lock has_accelerator hardware_infos logger torch_device_type torch_platform worker_address worker_info "
    "acquire_free_port broadcast connect_channel create_channel get_parent_rank log_debug log_error log_info "
    "log_on_first_rank log_warning pop_execution_time pop_execution_times recv recv_from recv_tensor send send_tensor "
    "send_to timer worker_timer"
)
"""Attributes of Worker that RLinf's code uses outside its scheduler and robots, private ones too."""


def tiny_model() -> torch.nn.Sequential:
    """Return the same two layers in every process."""
    layers = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 1))
    with torch.no_grad():
        for index, parameter in enumerate(layers.parameters()):
            parameter.copy_(torch.cos(torch.arange(parameter.numel()) + index).reshape(parameter.shape) / 2)
    return layers


def rows(first: int, count: int) -> torch.Tensor:
    return torch.sin(torch.arange(first * WIDTH, (first + count) * WIDTH, dtype=torch.float32)).reshape(count, WIDTH)


def trained_alone(batch: int, steps: int) -> list[torch.Tensor]:
    """Return the parameters after training on the whole batch in one process."""
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        model(rows(step * batch, batch)).square().mean().backward()
        optimizer.step()
    return [each.detach() for each in model.parameters()]


class FSDPActor(Worker):
    """A device mesh makes the process group from the environment; the model is sharded over it."""

    def __init__(self) -> None:
        Worker.__init__(self)
        from torch.distributed.device_mesh import init_device_mesh

        self.mesh = init_device_mesh("cpu", mesh_shape=(self._world_size,), mesh_dim_names=("fsdp",))
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self._logger.debug("sharding over %s on %s", self.mesh, self.torch_device_type)

    def init_worker(self) -> None:
        from torch.distributed.fsdp import fully_shard

        self.model = tiny_model()
        for layer in self.model:
            if list(layer.parameters()):
                fully_shard(layer, mesh=self.mesh)
        fully_shard(self.model, mesh=self.mesh)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    @Worker.timer("run_training")
    def run_training(self, batch: int, steps: int) -> list[torch.Tensor]:
        share = batch // self._world_size
        with self.device_lock:
            for step in range(steps):
                self.optimizer.zero_grad()
                self.model(rows(step * batch + self._rank * share, share)).square().mean().backward()
                self.optimizer.step()
        dist.barrier()
        return [each.full_tensor().detach().clone() for each in self.model.parameters()]  # type: ignore[attr-defined]

    def sync_model_to_rollout(self, group: str, ranks: list[Any]) -> None:
        """Send the whole weights: rank 0 to all of `group`, as FSDP's actor does."""
        weights = {name: each.full_tensor().detach() for name, each in self.model.state_dict().items()}
        if self._rank == 0:
            works = [self.send(weights, group, rank, async_op=True) for rank in ranks]
            for work in works:
                work.wait(60)
        dist.barrier()

    def missing(self) -> list[str]:
        absent = [name for name in VARIABLES.split() if name not in os.environ]
        return absent + [name for name in ATTRIBUTES.split() if not hasattr(self, name)]

    def shut(self) -> None:
        dist.destroy_process_group()


class MegatronActor(Worker):
    """A grid of tensor and data parallel groups, made in the same order by all ranks."""

    def __init__(self, tensor_parallel: int) -> None:
        Worker.__init__(self)
        environment = {name: os.environ[name] for name in ("NODE_RANK", "RANK", "WORLD_SIZE", "LOCAL_RANK")}
        self.rank, self.world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        self.local = int(os.environ["NODE_LOCAL_WORLD_SIZE"])
        dist.init_process_group("gloo", rank=self.rank, world_size=self.world, timeout=TIMEOUT)
        tensor, data = [], []
        for first in range(0, self.world, tensor_parallel):
            tensor.append(list(range(first, first + tensor_parallel)))
        for first in range(tensor_parallel):
            data.append(list(range(first, self.world, tensor_parallel)))
        self.tensor_ranks = next(ranks for ranks in tensor if self.rank in ranks)
        self.data_ranks = next(ranks for ranks in data if self.rank in ranks)
        groups = {tuple(ranks): dist.new_group(ranks) for ranks in [*tensor, *data]}
        self.tensor_group, self.data_group = groups[tuple(self.tensor_ranks)], groups[tuple(self.data_ranks)]

    def init_worker(self) -> None:
        """Keep a slice of the hidden layer."""
        whole = tiny_model()
        part = WIDTH // len(self.tensor_ranks)
        kept = slice(self.tensor_ranks.index(self.rank) * part, (self.tensor_ranks.index(self.rank) + 1) * part)
        self.parameters = [
            torch.nn.Parameter(whole[0].weight[kept].detach().clone()),
            torch.nn.Parameter(whole[0].bias[kept].detach().clone()),
            torch.nn.Parameter(whole[2].weight[:, kept].detach().clone()),
            torch.nn.Parameter(whole[2].bias.detach().clone()),
        ]
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.1)
        dist.barrier()

    def run_training(self, batch: int, steps: int) -> list[torch.Tensor]:
        share = batch // len(self.data_ranks)
        with self.worker_timer("training"):
            for step in range(steps):
                first = step * batch + self.data_ranks.index(self.rank) * share
                mine = rows(first, share) if self.rank == self.tensor_ranks[0] else None
                received = self.broadcast(mine, groups=[(self._group_name, self.tensor_ranks)])
                self._step(received, batch)
        slices: list[torch.Tensor] = [torch.empty(0)] * len(self.tensor_ranks)
        parts = [[torch.empty_like(each) for _ in slices] for each in self.parameters[:3]]
        for whole, each in zip(parts, self.parameters[:3], strict=True):
            dist.all_gather(whole, each.detach().contiguous(), group=self.tensor_group)
        return [
            torch.cat(parts[0]),
            torch.cat(parts[1]),
            torch.cat(parts[2], dim=1),
            self.parameters[3].detach().clone(),
        ]

    def _step(self, inputs: torch.Tensor, batch: int) -> None:
        weight, bias, out_weight, out_bias = self.parameters
        partial_out = torch.relu(inputs @ weight.T + bias) @ out_weight.T
        summed = partial_out.detach().clone()
        dist.all_reduce(summed, group=self.tensor_group)
        output = partial_out + (summed - partial_out.detach()) + out_bias
        self.optimizer.zero_grad()
        (output.square().sum() / batch).backward()
        for each in self.parameters:
            dist.all_reduce(each.grad, group=self.data_group)
        self.optimizer.step()

    def seconds(self) -> dict[str, float]:
        return self.pop_execution_times()

    def shut(self) -> None:
        dist.destroy_process_group()


# Engines: processes that a worker starts by multiprocessing's spawn. They have a process group of their own, and are
# members of the job, so that actors send weights to them directly.


def run_shard(parent: WorkerAddress, rank: int, size: int, init_method: str, pipe: Any) -> None:
    """Serve one tensor parallel rank of an engine until its pipe closes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=size, timeout=TIMEOUT)
    worker = Worker(parent_address=parent, world_size=size, rank=rank)
    weights: dict[str, torch.Tensor] = {}
    pipe.send((worker.get_name(), worker.get_parent_rank(), worker._rank))
    while True:
        try:
            command, argument = pipe.recv()
        except EOFError:
            break
        if command == "sync":
            work = worker.recv(argument, 0, async_op=True)
            weights = work.wait(60)
            worker.log_info(f"[dp {worker.get_parent_rank()}-tp {rank}] has new weights")
            pipe.send(len(weights))
        elif command == "generate":
            hidden = torch.relu(argument @ weights["0.weight"].T + weights["0.bias"])
            kept = slice(rank * WIDTH // size, (rank + 1) * WIDTH // size)
            output = hidden[:, kept] @ weights["2.weight"][:, kept].T
            dist.all_reduce(output)
            pipe.send(output + weights["2.bias"])
    dist.destroy_process_group()


def start_shards(parent: WorkerAddress, size: int, init_method: str) -> list[tuple[Any, Any]]:
    """Start the shards, and return a process and a pipe of each that is ready."""
    context = multiprocessing.get_context("spawn")
    shards = []
    for rank in range(size):
        ours, theirs = context.Pipe()
        process = context.Process(target=run_shard, args=(parent, rank, size, init_method, theirs))
        process.start()
        theirs.close()
        shards.append((process, ours))
    return shards


def ask_shards(shards: list[tuple[Any, Any]], command: str, argument: Any) -> list[Any]:
    for _, pipe in shards:
        pipe.send((command, argument))
    return [pipe.recv() for _, pipe in shards]


def end_shards(shards: list[tuple[Any, Any]]) -> list[int | None]:
    for _, pipe in shards:
        pipe.close()
    for process, _ in shards:
        process.join(60)
    return [process.exitcode for process, _ in shards]


def run_engine(make_executor: Any, pipe: Any) -> None:
    """vLLM's engine process: its executor starts the shards, so they are grandchildren of the worker."""
    shards = make_executor()
    pipe.send([pipe_of.recv() for _, pipe_of in shards])
    while True:
        command, argument = pipe.recv()
        if command == "end":
            pipe.send(end_shards(shards))
            return
        pipe.send(ask_shards(shards, command, argument))


class VLLMRollout(Worker):
    """Starts an engine process, which starts its shards; talks to it while its event loop goes on."""

    async def init_worker(self, shards: int) -> Any:
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        method = f"tcp://127.0.0.1:{self.acquire_free_port()}"
        executor = partial(start_shards, parent=self.worker_address, size=shards, init_method=method)
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.engine = context.Process(target=run_engine, args=(executor, theirs))
        self.engine.start()
        return await self._heard()

    async def _heard(self) -> Any:
        import asyncio

        return await asyncio.to_thread(self.pipe.recv)

    async def sync_model_from_actor(self, group: str) -> Any:
        self.pipe.send(("sync", group))
        return await self._heard()

    async def generate(self, inputs: torch.Tensor) -> Any:
        with self.device_lock, self.worker_timer():
            self.pipe.send(("generate", inputs))
            return await self._heard()

    async def shutdown_engine(self) -> Any:
        self.pipe.send(("end", None))
        codes = await self._heard()
        self.engine.join(60)
        return [*codes, self.engine.exitcode]


class SGLangRollout(Worker):
    """Starts its shards itself, on ports that it has acquired."""

    def init_worker(self, shards: int) -> Any:
        multiprocessing.set_start_method("spawn", force=True)
        os.environ["NCCL_CUMEM_ENABLE"] = "0"
        self.http_port = self.acquire_free_port(max_port_num=60000)
        assert self.http_port <= 60000
        self.shards = start_shards(self.worker_address, shards, f"tcp://127.0.0.1:{self.acquire_free_port()}")
        return [pipe.recv() for _, pipe in self.shards]

    def sync_model_from_actor(self, group: str) -> Any:
        return ask_shards(self.shards, "sync", group)

    def generate(self, inputs: torch.Tensor) -> Any:
        return ask_shards(self.shards, "generate", inputs)

    def shutdown_engine(self) -> Any:
        return end_shards(self.shards)
