"""Objects of every kind that travel, made anew in each process, their classes, and how to compare them."""

from __future__ import annotations

import dataclasses
import enum
import pathlib
import sys
from collections import OrderedDict, defaultdict, deque, namedtuple
from dataclasses import InitVar, dataclass, field
from typing import Any, ClassVar

import numpy as np

Step = namedtuple("Step", "observation reward done")


class Color(enum.Enum):
    RED = 1


@dataclass
class Batch:
    obs: Any
    rewards: Any = None
    tags: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Frozen:
    a: Any
    b: Any = None


@dataclass
class Made:
    """Its constructor counts: where it arrives, it must not have run."""

    value: Any
    scale: InitVar[int] = 2
    scaled: Any = field(init=False)
    made: ClassVar[int] = 0

    def __post_init__(self, scale: int) -> None:
        type(self).made += 1
        self.scaled = self.value * scale
        self.late = "set after"


class Tree:
    """As JAX's and torch's pytrees: leaves by attribute."""

    def __init__(self, **leaves: Any) -> None:
        self.leaves = leaves

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["leaves"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tree) and self.leaves == other.leaves

    __hash__ = None  # type: ignore[assignment]


class Slotted:
    __slots__ = ("x", "y")

    def __init__(self, x: Any) -> None:
        self.x = x


TOP = "an exception whose arguments are not its constructor's"


class TwoArguments(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


def zoo(with_torch: bool) -> dict[str, Any]:
    """One of each; the large ones go by another way than the small."""
    large = np.arange(200_000, dtype=np.float32)
    animals: dict[str, Any] = {
        "none": None,
        "scalars": [True, -(2**80), 1.5, 2 + 3j, float("inf"), "text \udc80", Color.RED],
        "bytes": [b"", b"x" * 10, b"y" * 300_000, bytearray(b"z" * 300_000)],
        "containers": {"a": (1, [2, {3, 4}], frozenset({5})), (1, 2): {"deep": [[[[{"er": ()}]]]]}},
        "collections": [OrderedDict(a=1), defaultdict(list, b=[2]), deque([1, 2], maxlen=3), range(5), slice(1, 2)],
        "namedtuple": Step(large[:10], 1.0, done=False),
        "dataclasses": [Batch({"x": large}, (1, 2)), Frozen(1, Frozen(large))],
        "made": Made(3, 5),
        "tree": Tree(a=large, b=[Tree(c=1)]),
        "slots": Slotted([large, 1]),
        "exceptions": [ValueError("x", 1), KeyError("k"), OSError(2, "no such", "file")],
        TOP: TwoArguments(5, "five"),  # pickle itself does not bring it back: only as a message of its own
        "path": pathlib.Path("/a/b"),
        "shared": [large, large],
        "arrays": [
            large,
            large.reshape(400, 500),
            np.asfortranarray(large.reshape(400, 500)),
            large[::2],
            large[10:20],
            np.zeros((0, 3)),
            np.array(5.0),
            np.array([(1, 2.0), (3, 4.0)], dtype=[("a", "i4"), ("b", "f8")]),
            np.array(["text", None], dtype=object),
            np.array(["2020-01-01"], dtype="M8[D]"),
            np.array(["abc", "d"]),
            np.arange(5, dtype=">i4"),
            np.float32(2.5),
        ],
        "a Fortran array": np.asfortranarray(large.reshape(400, 500)),
    }
    if with_torch:
        import torch  # here: without tensors, processes need not take the seconds of this import

        names = (
            "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64",
            "complex64", "complex128", "float8_e4m3fn", "float8_e5m2",
        )  # fmt: skip
        kinds = [getattr(torch, name) for name in names if hasattr(torch, name)]
        animals["tensors of every dtype"] = {
            f"{kind}{shape}": (torch.arange(max(1, int(np.prod(shape)))).reshape(shape or ()) % 7).to(kind)
            if 0 not in shape
            else torch.zeros(shape, dtype=kind)
            for kind in kinds
            for shape in ((), (0,), (2, 0, 3), (3, 4), (300, 400))
        }
        base = torch.arange(100_000)
        animals["views"] = [base[10:20], base[50_000:], base.reshape(100, 1000), (base.reshape(100, 1000).t(),)]
        animals["a tensor"] = torch.arange(100_000, dtype=torch.bfloat16)
        animals["a leaf"] = torch.ones(3, requires_grad=True)
        animals["modules"] = [torch.nn.Linear(3, 2).state_dict().keys(), torch.Size((1, 2)), torch.float16]
        animals["tensors in things"] = [Batch({"x": base}, torch.ones(2)), Frozen(base), Tree(a=base), Step(base, 1, 0)]
    return animals


def differs(ours: Any, theirs: Any, at: str = "") -> str:
    """Where *theirs* is not what *ours* is; "" if it is."""
    if type(ours) is not type(theirs):
        return f"{at}: {type(theirs).__name__} came for {type(ours).__name__}"
    if isinstance(ours, np.ndarray):
        same = (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        same = same and theirs.flags.f_contiguous >= ours.flags.f_contiguous
        by_value = ours.dtype.hasobject or ours.dtype.names is not None
        equal = same and (ours.tolist() == theirs.tolist() if by_value else np.array_equal(ours, theirs))
        equal = equal and theirs.flags.writeable
        return "" if equal else f"{at}: {theirs!r} came for {ours!r}, writable: {theirs.flags.writeable}"
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(ours, torch.Tensor):
        same = (ours.dtype, ours.shape, ours.requires_grad) == (theirs.dtype, theirs.shape, theirs.requires_grad)
        equal = same and torch.equal(ours.to(torch.complex128), theirs.to(torch.complex128))
        if equal and not theirs.requires_grad and theirs.numel():
            theirs.view(-1)[0] = 0  # it is ours to change
        return "" if equal else f"{at}: {theirs!r} came for {ours!r}"
    if isinstance(ours, BaseException):
        return differs((str(ours), ours.args, vars(ours)), (str(theirs), theirs.args, vars(theirs)), at)
    if isinstance(ours, dict):
        return _each(list(ours), list(theirs), at) or _each(list(ours.values()), list(theirs.values()), at)
    if isinstance(ours, (list, tuple, deque)):
        return _each(list(ours), list(theirs), at)
    if dataclasses.is_dataclass(ours):
        names = list(getattr(ours, "__dict__", [one.name for one in dataclasses.fields(ours)]))
        return differs([getattr(ours, name) for name in names], [getattr(theirs, name) for name in names], at)
    if isinstance(ours, Tree):
        return differs(ours.leaves, theirs.leaves, at)
    if isinstance(ours, Slotted):
        return differs(ours.x, theirs.x, at) or ("" if not hasattr(theirs, "y") else f"{at}: it has a y")
    if type(ours) is type({}.keys()):
        return differs(list(ours), list(theirs), at)
    return "" if ours == theirs else f"{at}: {theirs!r} came for {ours!r}"


def _each(ours: list[Any], theirs: list[Any], at: str) -> str:
    if len(ours) != len(theirs):
        return f"{at}: {len(theirs)} came for {len(ours)}"
    found = [differs(one, other, f"{at}[{n}]") for n, (one, other) in enumerate(zip(ours, theirs, strict=True))]
    return next(filter(None, found), "")
