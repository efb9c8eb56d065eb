"""A Gymnasium VectorEnv whose sub-environments live in the workers of a group, on one machine or many.

Seeds, infos and the three autoreset modes are those of gymnasium.vector.SyncVectorEnv, so both give the same results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from rlinf_actors import Cluster, NodePlacementStrategy, Worker

Make = Callable[[], gymnasium.Env[Any, Any]]


class Step(NamedTuple):
    """What one sub-environment returned. A step that also resets has two infos."""

    observation: Any
    reward: float
    terminated: bool
    truncated: bool
    infos: list[dict[str, Any]]


class SubEnvironments(Worker):
    """Sub-environments of one worker. Each list of a call or an answer has an element for each of them."""

    def __init__(self, makes: Sequence[Sequence[Make]], mode: AutoresetMode) -> None:
        super().__init__()
        self.envs = [make() for make in makes[self._rank]]
        self.mode = mode
        self.ended = [False] * len(self.envs)

    def describe(self) -> tuple[dict[str, Any], str | None, list[tuple[Any, Any]]]:
        """Return metadata, render mode, and each sub-environment's spaces of observations and actions."""
        first = self.envs[0]
        return first.metadata, first.render_mode, [(env.observation_space, env.action_space) for env in self.envs]

    def reset(
        self, wanted: list[tuple[bool, int | None]], options: dict[str, Any] | None
    ) -> list[tuple[Any, dict[str, Any]] | None]:
        """Reset each sub-environment whose element is true, with its seed. Return observations and infos."""
        answers: list[tuple[Any, dict[str, Any]] | None] = []
        for index, (chosen, seed) in enumerate(wanted):
            answers.append(self.envs[index].reset(seed=seed, options=options) if chosen else None)
            self.ended[index] = self.ended[index] and not chosen
        return answers

    def step(self, actions: list[Any]) -> list[Step]:
        """Take one action in each sub-environment."""
        return [self._step(index, action) for index, action in enumerate(actions)]

    def _step(self, index: int, action: Any) -> Step:
        env = self.envs[index]
        if self.ended[index]:
            if self.mode is AutoresetMode.DISABLED:
                raise gymnasium.error.ResetNeeded(f"sub-environment {index} of {self.get_name()} has ended: reset it")
            observation, info = env.reset()
            self.ended[index] = False
            return Step(observation, 0.0, False, False, [info])
        observation, reward, terminated, truncated, info = env.step(action)
        infos, ended = [info], terminated or truncated
        if ended and self.mode is AutoresetMode.SAME_STEP:
            infos = [{"final_obs": observation, "final_info": info}]
            observation, info = env.reset()
            infos.append(info)
        else:
            self.ended[index] = ended
        return Step(observation, float(reward), terminated, truncated, infos)

    def invoke(self, name: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> list[Any]:
        """Call a method of each sub-environment, or read an attribute."""
        found = [env.get_wrapper_attr(name) for env in self.envs]
        return [one(*arguments, **keywords) if callable(one) else one for one in found]

    def assign(self, values: list[Any], name: str) -> None:
        """Set an attribute of each sub-environment."""
        for env, value in zip(self.envs, values, strict=True):
            env.set_wrapper_attr(name, value)

    def _close(self) -> None:
        for env in self.envs:
            env.close()


class WorkerVectorEnv(VectorEnv[Any, Any, Any]):
    """A vector of sub-environments, which are dealt out to workers in equal parts.

    If a worker dies, the next method raises WorkerDiedError; close this VectorEnv and make a new one.

    Args:
        makes: functions that make one sub-environment each. Each runs in a worker.
        cluster: the cluster that starts the workers.
        placement: one worker for each of its ranks.
        autoreset_mode: as in SyncVectorEnv.
        name: name of the group.

    Raises:
        gymnasium.error.Error: the sub-environments have different spaces, or are fewer than the workers.
    """

    def __init__(
        self, makes: Sequence[Make], cluster: Cluster, placement: NodePlacementStrategy, *,
        autoreset_mode: AutoresetMode = AutoresetMode.NEXT_STEP, name: str = "environments",
    ) -> None:  # fmt: skip
        self.num_envs = len(makes)
        workers = len(placement.get_placement(cluster))
        if not 0 < workers <= len(makes):
            raise gymnasium.error.Error(f"{len(makes)} sub-environments cannot be dealt out to {workers} workers")
        self._parts = np.array_split(np.arange(len(makes)), workers)
        shares = [[makes[index] for index in part] for part in self._parts]
        group = SubEnvironments.create_group(shares, autoreset_mode)
        self._group = group.launch(cluster, placement, name=name)
        described = self._group.describe().wait()
        spaces = [pair for _, _, pairs in described for pair in pairs]
        if any(pair != spaces[0] for pair in spaces):
            self._group.shutdown()
            raise gymnasium.error.Error("the sub-environments have different spaces")
        metadata, self.render_mode, _ = described[0]
        self.metadata = {**metadata, "autoreset_mode": autoreset_mode}
        self.single_observation_space, self.single_action_space = spaces[0]
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._observations: list[Any] = [None] * self.num_envs

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all sub-environments, or those of ``options["reset_mask"]``. *seed* 5 gives them 5, 6, 7, ..."""
        seeds = [seed + index for index in range(self.num_envs)] if isinstance(seed, int) else seed
        seeds = [None] * self.num_envs if seeds is None else list(seeds)
        options = dict(options or {})
        chosen = options.pop("reset_mask", np.ones(self.num_envs, bool))
        wanted = list(zip(chosen.tolist(), seeds, strict=True))
        infos: dict[str, Any] = {}
        for index, answer in enumerate(self._each("reset", wanted, options or None)):
            if answer is not None:
                self._observations[index], info = answer
                infos = self._add_info(infos, info, index)
        return self._batch(), infos

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Take one action in each sub-environment. All workers step at the same time."""
        infos: dict[str, Any] = {}
        steps: list[Step] = self._each("step", list(iterate(self.action_space, actions)))
        for index, one in enumerate(steps):
            self._observations[index] = one.observation
            for info in one.infos:
                infos = self._add_info(infos, info, index)
        rewards = np.array([one.reward for one in steps])
        terminated, truncated = (np.array([one[field] for one in steps], bool) for field in (2, 3))
        return self._batch(), rewards, terminated, truncated, infos

    def call(self, name: str, *arguments: Any, **keywords: Any) -> tuple[Any, ...]:
        """Call a method of each sub-environment, or read an attribute."""
        parts = self._group.call(SubEnvironments.invoke, name, arguments, keywords).wait()
        return tuple(result for part in parts for result in part)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Return an attribute of each sub-environment."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of each sub-environment: to the values of a list or tuple, or all to one value."""
        each = list(values) if isinstance(values, (list, tuple)) else [values] * self.num_envs
        shares = [[each[index] for index in part] for part in self._parts]
        self._group.assign.scatter(shares, name).wait()

    def render(self) -> tuple[Any, ...]:
        """Return a frame of each sub-environment."""
        return self.call("render")

    def close_extras(self, **_keywords: Any) -> None:
        """Close all sub-environments, and end the workers."""
        self._group.shutdown()

    def _each(self, method: str, values: list[Any], *rest: Any) -> list[Any]:
        shares = [[values[index] for index in part] for part in self._parts]
        answers = getattr(self._group, method).scatter(shares, *rest).wait()
        return [answer for part in answers for answer in part]

    def _batch(self) -> Any:
        empty: Any = create_empty_array(self.single_observation_space, n=self.num_envs, fn=np.zeros)
        return concatenate(self.single_observation_space, self._observations, empty)
