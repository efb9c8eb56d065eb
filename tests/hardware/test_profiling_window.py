"""The capture window of a GPU profiler: it opens and closes torch.cuda.profiler, once each, and shows ranges."""

from __future__ import annotations

from typing import Any

import pytest

from rlinf_actors import AcceleratorUtil
from rlinf_actors.hardware.profiler_windows import CudaProfiler
from rlinf_actors.model.hardware import AcceleratorType

torch = pytest.importorskip("torch")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    made: list[Any] = []
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: made.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: made.append("stop"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda label: made.append(label))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: made.append("pop"))
    return made


def test_window_opens_and_closes_once(calls: list[Any]) -> None:
    window = CudaProfiler()
    window.stop()
    window.start(3)
    window.start(4)
    assert window.active
    window.stop()
    window.stop()
    assert calls == ["start", "stop"]
    assert not window.active


def test_range_ends_also_after_an_error_and_is_left_out_while_the_window_is_closed(calls: list[Any]) -> None:
    window = CudaProfiler()
    with window.range("not shown"):
        pass
    window.start()
    with pytest.raises(ValueError, match="oops"), window.range("shown"):
        raise ValueError("oops")
    assert calls == ["start", "shown", "pop"]


def test_types_without_a_profiler_do_nothing(calls: list[Any]) -> None:
    AcceleratorUtil.start_profiling(AcceleratorType.NO_ACCEL, 1)
    with AcceleratorUtil.profiling_range(AcceleratorType.NO_ACCEL, "x"):
        AcceleratorUtil.stop_profiling(AcceleratorType.NO_ACCEL)
    assert calls == []


def test_each_gpu_type_has_a_window(calls: list[Any]) -> None:
    for kind in (AcceleratorType.NV_GPU, AcceleratorType.AMD_GPU):
        AcceleratorUtil.start_profiling(kind)
        with AcceleratorUtil.profiling_range(kind, kind.value, color="green"):
            pass
        AcceleratorUtil.stop_profiling(kind)
    assert calls == ["start", "NV_GPU", "pop", "stop", "start", "AMD_GPU", "pop", "stop"]
