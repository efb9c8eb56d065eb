"""Rollout, agent loop, tool, reward and actor workers of a toy agent, with the interfaces that AgentRunner calls.

The language model adds: the answer of a prompt is the sum of its numbers. Its one weight is the probability of a right
answer, and a hash of the prompt draws. It asks a tool for sums of more than two numbers. Nothing depends on which
process does what, nor when.
"""

import asyncio
import zlib
from typing import Any

import stand_ins  # before any module of RLinf
import torch
from omegaconf import DictConfig
from rlinf.agents.tool_call.schema import ToolChannelRequest, ToolChannelResponse, ToolRequest
from rlinf.data.schema.reasoning_results import DynamicRolloutResult, RolloutResult
from rlinf.scheduler import Channel, Worker
from rlinf.workers.agent import agent_loop
from rlinf.workers.agent.agent_loop import AgentLoopOutput, AgentLoopWorker, MultiAgentLoopOutput, MultiAgentLoopWorker
from rlinf.workers.agent.tool_worker import ToolWorker

agent_loop.AutoTokenizer = stand_ins.Tokenizer  # there are no files of a tokenizer here
torch.set_num_threads(1)
TOOL, END = 1, 2  # tokens: "add up what follows", "the answer is what came before"


def chance(*values: Any) -> float:
    """Return a number of [0, 1) that depends on `values` alone."""
    return zlib.crc32(repr(values).encode()) / 2**32


class Rollout(Worker):
    """Serves prompts from a channel until the job ends; its model has one weight, the probability of a right answer."""

    def __init__(self, cfg: DictConfig, placement: Any, weight_reload: str = "sync", sharpness: float = 0.0) -> None:
        Worker.__init__(self)
        self.cfg, self.placement, self.weight_reload, self.sharpness = cfg, placement, weight_reload, sharpness
        self.served = 0

    async def init_worker(self) -> None:
        self.weights = {"right": torch.tensor([self.sharpness], dtype=torch.float64)}

    async def sync_model_from_actor(self) -> None:
        received = await self.recv(self.cfg.actor.group_name, self._rank, async_op=True).async_wait()
        self.weights = {name: each.clone() for name, each in received.items()}

    async def offload_engine(self) -> None:
        self.loaded = False

    async def onload_engine(self) -> None:
        self.loaded = True

    async def _answer(self, request: dict[str, Any], output_channel: Channel) -> None:
        prompt, options = request["prompt_ids"], request["sampling_params"] or {}
        await asyncio.sleep(0)
        numbers = [each - 10 for each in prompt if each >= 10]
        if len(numbers) > 2 and TOOL not in prompt:
            tokens = [TOOL]
        else:
            right = chance(prompt, options.get("sample", 0)) < float(self.weights["right"])
            tokens = [10 + (numbers[-1] if TOOL in prompt else sum(numbers)) + (not right), END]
        self.served += 1
        logprobs = [-float(self.weights["right"]) - 0.01 * each for each in tokens]
        await output_channel.put(
            {"output_ids": tokens, "logprobs": logprobs}, key=request["channel_key"], async_op=True
        ).async_wait()

    async def rollout_serverless(self, input_channel: Channel, output_channel: Channel) -> None:
        running = set()
        while True:
            request = await input_channel.get(async_op=True).async_wait()
            task = asyncio.create_task(self._answer(request, output_channel))
            running.add(task)
            task.add_done_callback(running.discard)

    def state(self) -> dict[str, Any]:
        return {"served": self.served, "right": self.weights["right"].item()}


class Tool(ToolWorker):
    """Adds numbers up."""

    def __init__(self, cfg: DictConfig) -> None:
        super().__init__()
        self.calls = 0

    def start_server(self) -> None:
        self.server = asyncio.get_running_loop().create_task(self._serve())

    def stop_server(self) -> None:
        self.server.cancel()

    async def _serve(self) -> None:
        answers = set()
        while True:
            request = await self.input_channel.get(async_op=True).async_wait()
            task = asyncio.create_task(self._answer(request))
            answers.add(task)
            task.add_done_callback(answers.discard)

    async def _answer(self, request: ToolChannelRequest) -> None:
        self.calls += 1
        result = ToolChannelResponse(success=True, result=sum(request.tool_args["numbers"]))
        await self.output_channel.put(result, key=request.session_id, async_op=True).async_wait()

    def state(self) -> int:
        return self.calls


class AgentLoop(AgentLoopWorker):
    """Asks the model, and a tool when the model asks for it; every query is one row of a RolloutResult."""

    def __init__(self, cfg: DictConfig, placement: Any) -> None:
        super().__init__(cfg, placement)
        self.max_prompt_len = int(cfg.data.max_prompt_length)
        self.samples: dict[tuple[int, ...], int] = {}

    def pre_process(self, prompt_ids: list[int]) -> dict[str, Any]:
        sample = self.samples[tuple(prompt_ids)] = self.samples.get(tuple(prompt_ids), -1) + 1
        return {"sample": sample}

    async def generate_llm_response(self, context: Any, prints: Any, problem: Any, prompt: Any) -> tuple[Any, ...]:
        found = await self.generate(prompt, {"sample": context["sample"]})
        tokens = found["output_ids"]
        return tokens == [TOOL], tokens, [1] * len(tokens), found["logprobs"], self.tokenizer.decode(tokens)

    async def generate_tool_response(
        self, context: Any, prints: Any, problem: Any, prompt: Any, tokens: Any, text: Any
    ) -> tuple[Any, ...]:
        numbers = [each - 10 for each in problem if each >= 10]
        answer = await self.tool_call(ToolRequest(name="add", arguments={"numbers": numbers}))
        return True, [10 + int(answer.text)], [0], [0.0]


class MultiTurnLoop(MultiAgentLoopWorker):
    """Every turn is a row of a DynamicRolloutResult; a second model judges the last turn."""

    async def pre_process_query(self, query: dict[str, Any], answer: Any) -> tuple[list[int], dict[str, Any]]:
        counts = self.__dict__.setdefault("counts", {})
        sample = counts[str(query)] = counts.get(str(query), -1) + 1
        return list(query), {"sample": sample, "answer": answer}

    async def generate_llm_response(self, context: Any, prints: Any, problem: Any, prompt: Any) -> tuple[Any, ...]:
        found = await self.generate(prompt, {"sample": context["sample"]})
        tokens = found["output_ids"]
        turn = AgentLoopOutput(
            prompt_ids=list(prompt),
            response_ids=tokens,
            response_logprobs=found["logprobs"],
            is_end=tokens[-1] == END,
            extra_fields={"turn": len(prompt) - len(problem)},
        )
        return not turn.is_end, tokens, self.tokenizer.decode(tokens), turn

    async def generate_tool_response(
        self, context: Any, prints: Any, problem: Any, prompt: Any, tokens: Any, text: Any
    ) -> tuple[Any, ...]:
        numbers = [each - 10 for each in problem if each >= 10]
        answer = await self.tool_call(ToolRequest(name="add", arguments={"numbers": numbers}))
        return True, [*prompt, *tokens, 10 + int(answer.text)]

    async def post_process_query(self, context: dict[str, Any], output: MultiAgentLoopOutput) -> MultiAgentLoopOutput:
        last = output.single_turn_outputs[-1]
        judged = await self.generate([10 + last.response_ids[0] - 10], {"sample": 0}, rollout_name="judge")
        reward = float(judged["output_ids"][0] - 10 == context["answer"])
        for turn in output.single_turn_outputs:
            turn.reward_score = reward
        output.extra_fields["turns"] = len(output.single_turn_outputs)
        return output

    def get_rollout_metrics(self, rollout_result: DynamicRolloutResult) -> dict[str, Any]:
        rewards = rollout_result.rewards
        return {
            "__sum__/agent/turns": rollout_result.num_sequence,
            "__max__/agent/longest": max(rollout_result.prompt_lengths),
            "__mean__/agent/reward": (sum(rewards), len(rewards)),
        }


class Reward(Worker):
    """1 for a right answer."""

    def __init__(self, cfg: DictConfig) -> None:
        Worker.__init__(self)
        self.total = int(cfg.data.rollout_batch_size) * int(cfg.algorithm.group_size)

    def init_worker(self) -> None:
        self.scored = 0

    @Worker.timer("compute_rewards")
    def compute_rewards(self, input_channel: Channel, output_channel: Channel) -> None:
        seen = 0
        while seen < self.total:
            result: RolloutResult = input_channel.get()
            seen += result.num_sequence
            rows = zip(result.response_ids, result.answers, strict=True)
            result.rewards = torch.tensor([float(ids[-2] - 10 == answer) for ids, answer in rows], dtype=torch.float64)
            result.answers = None
            output_channel.put(result, async_op=True)
        self.scored += seen


class Actor(Worker):
    """Learns to be right: its one weight grows with the rewards that it receives."""

    def __init__(self, cfg: DictConfig, placement: Any) -> None:
        Worker.__init__(self)
        self.cfg = cfg
        self.weights = {"right": torch.tensor([0.3], dtype=torch.float64)}

    def init_worker(self) -> None:
        self.step = 0

    def sync_model_to_rollout(self) -> None:
        self.send(self.weights, self.cfg.rollout.group_name, self._rank)

    def del_reshard_state_dict(self) -> None:
        pass

    @Worker.timer("run_training")
    def run_training(self, input_channel: Channel) -> tuple[dict[str, float], list[dict[str, float]]]:
        results = [input_channel.get() for _ in range(int(self.cfg.data.rollout_batch_size))]
        results.sort(key=lambda each: str(each.prompt_ids if isinstance(each, RolloutResult) else each.input_ids))
        rewards = torch.cat([torch.as_tensor(each.rewards, dtype=torch.float64) for each in results])
        logprobs = sum(sum(map(sum, each.rollout_logprobs)) for each in results)
        losses = []
        for part in rewards.chunk(int(self.cfg.algorithm.n_minibatches)):
            self.weights["right"] += 0.1 * part.mean()
            losses.append({"loss": 1 - part.mean().item(), "right": self.weights["right"].item()})
        self.step += 1
        lengths = [length for each in results for length in each.response_lengths]
        rollout = {"rewards": rewards.mean().item(), "logprobs": float(logprobs), "response_length": sum(lengths)}
        return rollout, losses

    def save_checkpoint(self, path: str, step: int) -> None:
        from rlinf.utils.runner_utils import local_mkdir_safe

        torch.save(self.weights, f"{local_mkdir_safe(path)}/weights.pt")
