"""Stands in for packages that RLinf's agent runner imports and that these programs do not need.

A package that is installed is used. AgentRunner imports pandas and torchdata for things that a run of a few steps does
not need, and three workers of RLinf (which need Megatron and torchvision) for annotations only. The agents' modules
import this one first, so that it holds in the driver and in every worker.
"""

import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator
from typing import Any


def _missing(package: str) -> bool:
    return package not in sys.modules and importlib.util.find_spec(package) is None


def _module(name: str, **names: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(module).update(names)
    sys.modules[name] = module
    return module


class _Table:
    """The empty table that ReasoningRunner keeps for one of its loggers."""

    def __init__(self, columns: list[str]) -> None:
        self.columns = columns


class _StatefulDataLoader:
    """torch's DataLoader, with the state that a checkpoint keeps: here none."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        from torch.utils.data import DataLoader

        self._loader: Any = DataLoader(*args, **kwargs)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)

    def __len__(self) -> int:
        return len(self._loader)

    def state_dict(self) -> dict[str, Any]:
        return {}


class Tokenizer:
    """One token a character; in the agents of these programs, and for all where transformers is not installed."""

    eos_token_id = 0

    @classmethod
    def from_pretrained(cls, path: str, **options: Any) -> "Tokenizer":
        return cls()

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, ids: list[int], **options: Any) -> str:
        return "".join(map(chr, ids))


if _missing("pandas"):
    _module("pandas", DataFrame=_Table)
if _missing("torchdata"):
    _module("torchdata")
    _module("torchdata.stateful_dataloader", StatefulDataLoader=_StatefulDataLoader)
if _missing("transformers"):
    _module("transformers", AutoTokenizer=Tokenizer, PreTrainedTokenizer=Tokenizer)
if _missing("torchvision"):
    _module("rlinf.workers.reward.reward_worker", RewardWorker=type("RewardWorker", (), {}))
if _missing("megatron"):
    _module("rlinf.workers.actor.megatron_actor_worker", MegatronActor=type("MegatronActor", (), {}))
    _module("rlinf.workers.inference.megatron_inference_worker", MegatronInference=type("MegatronInference", (), {}))
