"""Workers that give each other objects of every kind."""

from __future__ import annotations

from typing import Any

import message_zoo

from rlinf_actors import Worker


class Keeper(Worker):
    """Sends its animals, and compares what it gets with its own."""

    def send_all(self, way: str, with_torch: bool, groups: Any = None) -> None:
        works = []
        for name, animal in message_zoo.zoo(with_torch).items():
            if way == "sync":
                self.send(animal, "b", 0)
            elif way == "async":
                works.append(self.send(animal, "b", 0, async_op=True))
            elif way == "piggyback":
                self.send(name, "b", 0, piggyback_payload=[animal] if name != message_zoo.TOP else [None])
            else:
                works.append(self.broadcast(animal, groups=groups, async_op=True))
        for work in works:
            work.wait()

    def compare_all(self, way: str, with_torch: bool, groups: Any = None) -> list[str]:
        wrong = []
        for name, animal in message_zoo.zoo(with_torch).items():
            got = self.broadcast(groups=groups) if way == "broadcast" else self.recv("a", 0)
            if way == "piggyback":
                assert got[0] == name
                got = got[1][0] if name != message_zoo.TOP else animal
            difference = message_zoo.differs(animal, got, name)
            if difference:
                wrong.append(difference)
        return wrong
