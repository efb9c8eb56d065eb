"""Worker classes of the tests of handles."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass, field
from typing import Any

from rlinf_actors import Worker, WorkerAddress, WorkerGroup


@dataclass
class Box:
    """An object of the user's with handles somewhere inside."""

    inside: dict[str, list[Any]] = field(default_factory=dict)


class Counter(Worker):
    """What is called through handles."""

    def __init__(self, start: int = 0) -> None:
        super().__init__()
        self.seen: list[int] = [start]

    def add(self, n: int = 1) -> int:
        self.seen.append(n)
        return sum(self.seen)

    def order(self) -> list[int]:
        return self.seen

    def pid(self) -> int:
        return os.getpid()

    def dies(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    async def count(self, n: int):
        for i in range(n):
            yield i


class Holder(Worker):
    """Gets handles in all ways, and calls them."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self.group = group

    def calls(self, group: Any, n: int = 1) -> list[int]:
        return group.add(n).wait()

    def calls_in_order(self, group: Any, n: int) -> list[int]:
        works = [group.add(i) for i in range(n)]
        return [work.wait()[0] for work in works]

    def calls_inside(self, box: Box) -> list[Any]:
        return [handle.add(1).wait() for handles in box.inside.values() for handle in handles]

    def calls_own(self) -> list[int]:
        return self.group.add(1).wait()

    def gives(self) -> Any:
        return self.group

    def keeps(self, group: Any) -> None:
        self.group = group

    def facts(self, group: Any) -> Any:
        infos = [info.rank for info in group.worker_info_list]
        return repr(group), group.world_size, infos, len(group.placements), hasattr(group, "nothing")

    def error(self, group: Any) -> tuple[str, str]:
        try:
            group.add(1).wait()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            return type(error).__name__, str(error)
        return "", ""

    def kills(self, group: Any) -> tuple[str, str]:
        try:
            group.dies().wait()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            return type(error).__name__, str(error)
        return "", ""

    def calls_address(self, cls: type, address: WorkerAddress) -> list[int]:
        return WorkerGroup.from_address(cls, address).add(1).wait()

    def private(self, group: Any) -> str:
        try:
            group._secret()
        except (ValueError, AttributeError) as error:
            return str(error)
        return ""

    def streams(self, view: Any) -> list[int]:
        return [item for _, item in view.count(3)]

    def shuts_down(self, group: Any) -> None:
        group.shutdown()

    def sends(self, group: Any, to: str) -> None:
        self.send(group, to, 0)

    def receives(self, source: str) -> list[int]:
        return self.recv(source, 0).add(1).wait()

    def broadcasts(self, group: Any, groups: list[Any], src: Any) -> list[int]:
        return self.broadcast(group, groups, src).add(1).wait()

    def takes(self, channel: Any) -> list[int]:
        return channel.get().add(1).wait()

    def puts(self, channel: Any, item: Any) -> None:
        channel.put(item)

    def returns_a_result(self) -> Any:
        return self.group.add(1)

    def waits_for_itself(self, group: Any) -> str:
        try:
            group.gives().wait()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            return f"{type(error).__name__}: {error}"
        return ""


class AsyncHolder(Worker):
    """The same in a running loop."""

    async def calls(self, group: Any) -> list[Any]:
        works = [group.add(i) for i in range(5)]
        await group
        return [(await work)[0] for work in works]

    async def awaits(self, group: Any) -> str:
        try:
            await group
        except Exception as error:  # noqa: BLE001 - the test looks at it
            return f"{type(error).__name__}: {error}"
        return ""

    async def calls_while_the_head_stands(self, group: Any, head: int) -> list[int]:
        """Whoever blocks the loop here waits for a head that goes on only after that."""
        os.kill(head, signal.SIGSTOP)
        try:
            works = [group.add(1), group.add(1)]
            ready = asyncio.ensure_future(_ready(group))
            await asyncio.sleep(0)
        finally:
            os.kill(head, signal.SIGCONT)
        await ready
        return [(await work)[0] for work in works]


async def _ready(group: Any) -> None:
    await group


class Gated(Worker):
    """Waits in its constructor until a FIFO is opened, and fails there if it is told to."""

    def __init__(self, gate: str = "", fails: bool = False) -> None:
        super().__init__()
        if gate:
            self.opens(gate)
        if fails:
            raise ValueError("as it was told")

    def opens(self, gate: str) -> None:
        with open(gate) as opened:
            opened.read()
