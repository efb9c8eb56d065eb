"""Tests that need a GPU. Where there is none they are skipped before torch is loaded."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from rlinf_actors import Cluster

HERE = Path(__file__).parent


def missing() -> str:
    """Why these tests cannot run here, "" where they can."""
    if not Path("/dev/nvidiactl").exists():
        return "no NVIDIA device: /dev/nvidiactl is not there"
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    return "" if torch.cuda.is_available() else f"torch {torch.__version__} finds no CUDA device"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mine = [item for item in items if HERE in item.path.parents]
    reason = missing() if mine else ""
    if reason:
        for item in mine:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="module")
def cluster():
    made = Cluster(num_nodes=1)
    yield made
    made.shutdown()
