"""Cart-pole in numpy, and a linear policy for it.

A pole stands on a cart. In each step the policy pushes the cart to the left or to the right. An episode ends when the
pole falls, when the cart leaves the track, or after 500 steps. Its return is the number of its steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

LONGEST = 500
TRACK_M, ANGLE_RAD = 2.4, np.radians(12)


@dataclass
class Batch:
    """Episodes that were played side by side. An episode that has ended goes on as zeros in `alive`.

    Attributes:
        states: cart's position and speed, pole's angle and angular speed: (steps, 4, episodes).
        surprise: the action, 1 or 0, less its probability: (steps, episodes).
        alive: 1 while the episode runs: (steps, episodes).
    """

    states: Floats
    surprise: Floats
    alive: Floats

    @property
    def returns(self) -> Floats:
        """The return of each episode."""
        total: Floats = self.alive.sum(axis=0)
        return total


def move(state: Floats, right: NDArray[np.bool_]) -> Floats:
    """Return the state 20 ms later: a cart of 1 kg, a pole of 0.1 kg and 1 m, and a push of 10 N."""
    _place, speed, angle, turning = state
    sin, cos = np.sin(angle), np.cos(angle)
    push = (np.where(right, 10.0, -10.0) + 0.05 * turning**2 * sin) / 1.1
    angular = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
    linear = push - 0.05 * angular * cos / 1.1
    return state + 0.02 * np.stack([speed, linear, turning, angular])


def play(weights: Floats, seed: tuple[int, ...], episodes: int = 16) -> Batch:
    """Play episodes with the policy of these weights. The same seed gives the same episodes."""
    random = np.random.default_rng(seed)
    state, alive = random.uniform(-0.05, 0.05, (4, episodes)), np.ones(episodes, bool)
    steps: list[tuple[Floats, Floats, NDArray[np.bool_]]] = []
    while alive.any() and len(steps) < LONGEST:
        chance = 1 / (1 + np.exp(-(weights @ state)))  # of a push to the right
        right = random.random(episodes) < chance
        steps.append((state, right - chance, alive))
        state = move(state, right)
        alive = alive & (np.abs(state[0]) < TRACK_M) & (np.abs(state[2]) < ANGLE_RAD)
    states, surprise, lived = zip(*steps, strict=True)
    return Batch(np.array(states), np.array(surprise), np.array(lived, np.float64))


def improved(weights: Floats, batches: list[Batch], rate: float = 0.7) -> Floats:
    """Return the weights after one step of REINFORCE: what preceded many further steps gets more probable."""
    ahead = [batch.alive[::-1].cumsum(axis=0)[::-1] for batch in batches]  # steps that follow, by step and episode
    total, running = np.zeros(LONGEST), np.zeros(LONGEST)
    for batch, left in zip(batches, ahead, strict=True):
        total[: len(left)] += left.sum(axis=1)
        running[: len(left)] += batch.alive.sum(axis=1)
    usual = total / np.maximum(running, 1)  # by step: the mean over the episodes that still run
    gradient = np.zeros(4)
    for batch, left in zip(batches, ahead, strict=True):
        advantage = (left - usual[: len(left), None]) * batch.alive
        gradient += np.einsum("te,te,tse->s", advantage, batch.surprise, batch.states)
    step: Floats = rate * gradient / np.linalg.norm(gradient)
    return weights + step
