"""The plan of a round, from the seed alone; sender and receiver compute it separately. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

MIB = 1 << 20
SIZES = (0, 1, 100, 5_000, 40_000, 300_000, 2 * MIB, 8 * MIB)
WEIGHTS = (2, 2, 6, 4, 4, 3, 2, 1)
"""Relative frequencies of SIZES."""
BASE = 16 * MIB
"""Size of the block from which contents are cut."""
KEYS = ("k0", "k1", "k2")
CHANNELS = {"free": {"maxsize": 0}, "tight": {"maxsize": 3}, "spread": {"maxsize": 8, "distributed": True}}


@dataclass(frozen=True)
class Item:
    """One thing to send or put.

    Attributes:
        offset, size: its bytes in the block.
        tensor: True if it is sent by send_tensor and recv_tensor.
        at_once: True if the next item is sent before this one has ended.
    """

    offset: int
    size: int
    tensor: bool
    at_once: bool


def items(seed: str, most: int, tensors: bool = False) -> list[Item]:
    """Up to *most* items; *seed* names run, round and stream."""
    rng = random.Random(seed)
    made = []
    for _ in range(rng.randint(most // 3, most)):
        size = rng.choices(SIZES, WEIGHTS)[0]
        made.append(Item(rng.randrange(BASE - size), size, tensors and rng.random() < 0.4, rng.random() < 0.5))
    return made


@dataclass(frozen=True)
class Round:
    """One round.

    Attributes:
        seed: of the run and round.
        names: the workers, the steady ones first; also the order of broadcasts' members.
        caster: the worker that broadcasts.
        victims: the killed workers, and the number of events before each death.
        puts: worker, channel and key of each producer.
        gets: worker, channel and key of each consumer; several may share a key.
    """

    seed: str
    names: tuple[str, ...]
    caster: str
    victims: dict[str, int]
    puts: tuple[tuple[str, str, str], ...]
    gets: tuple[tuple[str, str, str], ...]


def plan(seed: int, number: int, names: Sequence[str], steady: int) -> Round:
    """Round *number* of the run *seed*; of *names* the first *steady* are never killed."""
    rng = random.Random(f"{seed} {number}")
    mortal = list(names[steady:])
    dying = rng.sample(mortal, rng.choice((0, 1, 1, min(2, len(mortal)))))
    places = [(channel, key) for channel in CHANNELS for key in KEYS]
    puts = tuple((who, *place) for who in names for place in rng.sample(places, 3))
    gets = []
    for place in places:
        # one consumer survives the round, so that no producer waits for room for ever
        everybody = {rng.choice(names[:steady]), *rng.sample(list(names), rng.randint(0, len(names) - 1))}
        gets += [(who, *place) for who in sorted(everybody)]
    return Round(
        f"{seed} {number}",
        tuple(names),
        rng.choice(list(names)),
        {who: rng.randint(1, 250) for who in sorted(dying)},
        puts,
        tuple(gets),
    )
