"""What everybody does in a round, from the seed alone; sender and receiver work it out each for itself. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

MIB = 1 << 20
SIZES = (0, 1, 100, 5_000, 40_000, 300_000, 2 * MIB, 8 * MIB)
WEIGHTS = (2, 2, 6, 4, 4, 3, 2, 1)
"""Of SIZES: how often."""
BASE = 16 * MIB
"""Bytes of the block that contents are cut from."""
KEYS = ("k0", "k1", "k2")
CHANNELS = {"free": {"maxsize": 0}, "tight": {"maxsize": 3}, "spread": {"maxsize": 8, "distributed": True}}


@dataclass(frozen=True)
class Item:
    """One thing to send or put.

    Attributes:
        offset, size: which bytes of the block it is.
        tensor: whether it goes by send_tensor and recv_tensor.
        at_once: whether the next one is begun before it has ended.
    """

    offset: int
    size: int
    tensor: bool
    at_once: bool


def items(seed: str, most: int, tensors: bool = False) -> list[Item]:
    """Up to *most* of them; *seed* names run, round and stream."""
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
        caster: who broadcasts.
        victims: who is killed, and after how many events.
        puts: who puts into which channel and key.
        gets: who gets from which channel and key; several get from one.
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
        # one who lives to the end of the round is among them: nobody waits for room for ever
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
