"""Classes of a script travel by value; in the process where they arrive they keep their state from then on."""

from __future__ import annotations

import live_workers as lw
import pytest

pytestmark = pytest.mark.live

SCRIPT = '''
import gc
from dataclasses import dataclass
from typing import ClassVar

from rlinf_actors import Channel, Cluster, NodePlacementStrategy, Worker


class Named:
    named: ClassVar[dict] = {}

    def __init_subclass__(cls):
        cls.named[cls.__name__] = cls


@dataclass
class Early(Named):
    "Arrives with the worker's class, which names it."

    number: int = 0
    seen: ClassVar[int] = 0


@dataclass
class Late(Named):
    "Arrives with an argument."

    number: int = 0
    seen: ClassVar[int] = 0


class Env(Worker):
    steps = 0

    def take(self, one):
        return self.note(one, Early)

    def take_late(self, one):
        return self.note(one, type(one))

    def note(self, one, cls):
        gc.collect()
        assert type(one) is cls is cls.named[cls.__name__], "one class for each"
        cls.seen += 1
        Env.steps += 1
        return cls.seen, Env.steps

    def give(self, one):
        type(one).seen += 100
        return one

    def take_from(self, channel):
        return self.take(channel.get())

    def stream(self, one):
        type(one).seen += 100
        yield one

    def pass_on(self, one):
        self.send(one, "other", 0)

    def receive(self):
        return self.take(self.recv("env", 0))

    def shared(self, one):
        return self.take(self.broadcast(one, groups=[("env", 0), ("other", 0)]))


AGAIN = """
@dataclass
class Late(Named):
    seen: ClassVar[int] = 500
    more: str = "more"
"""

with Cluster(num_nodes=1) as cluster:
    first = NodePlacementStrategy([0])
    env, other = (Env.create_group().launch(cluster, first, name=name) for name in ("env", "other"))
    channel = Channel.create("items")
    for n in (1, 2):
        print("argument", env.take(Early(n)).wait(), env.take_late(Late(n)).wait())
        Early.seen = Late.seen = Env.steps = 1000
    print("result", env.give(Early(3)).wait(), Early.seen)
    print("stream", [one for _, one in env.stream(Late(3))], Late.seen)
    channel.put(Early(4))
    print("channel", env.take_from(channel).wait())
    env.pass_on(Early(5)).wait()
    print("recv", other.receive().wait())
    both = [group.shared(Early(6)) for group in (env, other)]
    print("broadcast", *[one.wait() for one in both])
    exec(AGAIN)  # as a cell of a notebook does that runs again
    print("defined again", env.take_late(Late()).wait(), env.take_late(Late()).wait(), env.give(Late()).wait())
'''

SHOWN = """
argument [(1, 1)] [(1, 2)]
argument [(2, 3)] [(2, 4)]
result [Early(number=3)] 1000
stream [Late(number=3)] 1000
channel [(103, 5)]
recv [(1, 1)]
broadcast [(104, 6)] [(2, 2)]
defined again [(501, 7)] [(502, 8)] [Late(more='more')]
"""


def test_classes_of_a_script_keep_their_state_where_their_instances_arrive(tmp_path):
    done = lw.run_script(tmp_path, SCRIPT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == SHOWN.strip()
