"""A program that moves tensors of all kinds in all ways where numpy is missing. Run by test_without_numpy.py."""

from __future__ import annotations

import importlib.util
import itertools
import warnings
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch tells of numpy that it is missing
    import torch

from rlinf_actors import Channel, Cluster, Worker

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.bool,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.complex64, torch.complex128,
)  # fmt: skip
SHAPES = ((), (0,), (3, 0, 2), (5,), (300, 401))


def without_numpy() -> bool:
    """True if neither we nor torch have numpy here."""
    try:
        torch.zeros(1).numpy()
    except RuntimeError as error:
        return "Numpy is not available" in str(error) and importlib.util.find_spec("numpy") is None
    return False


def samples() -> list[Any]:
    """Tensors of all types and shapes, and nested ones whose memory is not what they show."""
    found: list[Any] = []
    for number, (dtype, shape) in enumerate(itertools.product(DTYPES, SHAPES)):
        found.append((torch.arange(torch.Size(shape).numel()) % 7 + number % 2).reshape(shape).to(dtype))
    big = torch.arange(120_000.0).reshape(300, 400)
    lazy = [torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j]).conj().imag]
    found.append({"deep": [(big.t(), big[::2, 3:7], big[7])], "lazy": lazy, "leaf": torch.ones(3, requires_grad=True)})
    return found


def equal(a: Any, b: Any) -> bool:
    """True if both hold the same tensors."""
    if isinstance(a, torch.Tensor):
        facts = [(one.dtype, one.shape, one.requires_grad) for one in (a, b)]
        wide = torch.complex128 if a.dtype.is_complex else torch.float64
        return facts[0] == facts[1] and torch.equal(a.to(wide), b.to(wide))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))


class Mover(Worker):
    def lacks_numpy(self) -> bool:
        return without_numpy()

    def back(self, value: Any) -> Any:
        assert equal(value, samples())
        return value

    def say(self, group: str) -> None:
        for value in samples():
            self.send(value, group, 0)
        self.send(samples(), group, 0, async_op=True).wait()
        self.send_tensor(torch.full((300, 400), 2.5), group, 0)
        self.send_tensor(torch.ones(3, dtype=torch.bfloat16), group, 0)

    def hear(self, group: str) -> bool:
        good = [equal(self.recv(group, 0), value) for value in samples()]
        good.append(equal(self.recv(group, 0), samples()))
        into = [torch.zeros(300, 400), torch.zeros(3, dtype=torch.bfloat16)]
        for target in into:
            self.recv_tensor(target, group, 0)
        return all(good) and bool((into[0] == 2.5).all()) and bool((into[1] == 1).all())

    def share(self, groups: Any) -> bool:
        mine = samples() if self._group_name == "a" else None
        return equal(self.broadcast(mine, groups=groups), samples())

    def put(self, channel: Channel) -> None:
        for value in samples():
            channel.put(value)

    def take(self, channel: Channel) -> bool:
        return all(equal(channel.get(), value) for value in samples())

    async def stream(self) -> Any:
        for value in samples():
            yield value


def main() -> None:
    assert without_numpy()
    with Cluster(num_nodes=1) as cluster:
        a, b = (Mover.create_group().launch(cluster, name=name, preload=["torch"]) for name in "ab")
        assert a.lacks_numpy().wait() == b.lacks_numpy().wait() == [True]
        (back,) = a.back(samples()).wait()
        assert equal(back, samples())
        by_lane = {"RLINF_ACTORS_PATHS": "cpu=lane"}
        c, d = (Mover.create_group().launch(cluster, name=n, preload=["torch"], env_vars=by_lane) for n in "cd")
        works = [a.say("b"), b.hear("a"), c.say("d"), d.hear("c")]
        assert [work.wait() for work in works] == [[None], [True], [None], [True]]
        groups = [("a", [0]), ("b", [0])]
        assert [work.wait() for work in (a.share(groups), b.share(groups))] == [[True], [True]]
        channel = Channel.create("items")
        putting, taking = a.put(channel), b.take(channel)
        assert (putting.wait(), taking.wait()) == ([None], [True])
        channel.put(samples())
        assert equal(channel.get(), samples())
        assert all(equal(item, value) for (_, item), value in zip(a.stream(), samples(), strict=True))
    print("all is there")


if __name__ == "__main__":
    main()
