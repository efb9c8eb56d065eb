"""Python blocks of pages that are no programs run, one after the other, on a cluster of two nodes.

tests/typing checks the types of every block. Those that define a class alone, or need hardware, are left to it.
"""

from __future__ import annotations

import asyncio
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlinf_actors import Cluster
from rlinf_actors.testing import LocalCluster

PAGES = Path(__file__).resolve().parents[2] / "docs" / "how-to"
ALL = """
from collections.abc import Iterator
from pathlib import Path
import threading
from rlinf_actors import *
"""
SNIPPETS = {
    "call-workers": {
        0: """
            class Stepper(Worker):
                def step(self, x, lr=0.0): return x
                def score(self, path): return len(path)
                def rollout(self): return "a rollout"
                def rollouts(self, n): yield from range(n)
            async def arriving():
                for path in paths: yield path
            Scorer, Rollout, x, paths, paths_as_they_come = Stepper, str, 1, ["a", "bb", "ccc"], arriving()
            group = Stepper.create_group().launch(cluster, NodePlacementStrategy([0] * 4 + [1] * 4), name="steppers")
            """,
        1: "assert (totals, first) == ([6], 10)",
        2: "group = group.execute_on(0, 1, 2, 3)",
        3: "assert losses == [[0, 1], [2, 3], [4, 5], [6, 7]]",
    },
    "resize-groups": {
        0: """
            class Rollout(Worker):
                def __init__(self, model): ...
                def step(self): return self._world_size
            model, strategy = None, NodePlacementStrategy
            def NodePlacementStrategy(nodes): return strategy([node % 2 for node in nodes])
            """,
        1: "assert (ranks, group.step().wait()) == ([2, 3], [2, 2])",
    },
    "share-groups": {
        0: """
            class Sampler(Worker):
                def sample(self, n): return [0] * n
            class Model(Worker):
                def __init__(self, version): ...
                def predict(self, x): return x
            x, sampler = 1, Sampler.create_group().launch(cluster, NodePlacementStrategy([0, 1]), name="samplers")
            def Cluster(head, namespace): return cluster
            """,
        1: "assert trainer.step().wait() == [2]",
    },
}
"""By page: what its blocks take for granted, and what must hold after a block, by the block's number."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with LocalCluster(2) as local, local.cluster(namespace="pages") as made:
        yield made


@pytest.mark.live
@pytest.mark.parametrize("page", SNIPPETS)
def test_snippets_run(page, cluster):
    names = {"cluster": cluster, "__name__": page}
    exec(ALL + textwrap.dedent(SNIPPETS[page][0]), names)
    blocks = re.findall(r"^```python\n(.*?)^```$", (PAGES / f"{page}.md").read_text(), re.MULTILINE | re.DOTALL)
    for number, text in enumerate(blocks, 1):
        try:
            exec(compile(text, f"{page}.md, block {number}", "exec"), names)
        except SyntaxError:  # await outside of a coroutine
            exec("async def block():\n" + textwrap.indent(text, "    "), names)
            asyncio.run(names["block"]())
        exec(textwrap.dedent(SNIPPETS[page].get(number, "")), names)
