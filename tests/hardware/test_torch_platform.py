"""Torch's module of an accelerator, and the plug-in that a vendor's row names."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from rlinf_actors.errors import ConfigError, UsageError
from rlinf_actors.hardware.accelerators import AcceleratorUtil
from rlinf_actors.messaging import process_groups


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> types.SimpleNamespace:
    """A torch that knows cuda only, and a directory for plug-ins on the path."""
    fake = types.SimpleNamespace(cuda="torch.cuda", path=tmp_path)
    monkeypatch.setitem(sys.modules, "torch", fake)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("torch_npu", "torch_musa"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return fake


def test_the_plug_in_is_imported_where_torch_lacks_the_device(torch: types.SimpleNamespace) -> None:
    (torch.path / "torch_npu.py").write_text("import sys\nsys.modules['torch'].npu = 'torch.npu'\n")
    assert AcceleratorUtil.get_torch_platform("NPU") == "torch.npu"
    del sys.modules["torch_npu"]


def test_no_plug_in_is_imported_where_torch_has_the_device(torch: types.SimpleNamespace) -> None:
    torch.musa = "torch.musa"
    assert AcceleratorUtil.get_torch_platform("MUSA_GPU") == "torch.musa"
    assert AcceleratorUtil.get_torch_platform("KUNLUN_XPU") == "torch.cuda"


def test_a_plug_in_that_is_missing_broken_or_of_no_use(torch: types.SimpleNamespace) -> None:
    with pytest.raises(UsageError, match="plug-in torch_musa cannot be imported: ModuleNotFoundError"):
        AcceleratorUtil.get_torch_platform("MUSA_GPU")
    (torch.path / "torch_musa.py").write_text("raise OSError('libmusa.so.1: cannot open shared object file')\n")
    with pytest.raises(UsageError, match=r"torch_musa cannot be imported: OSError: libmusa\.so\.1"):
        AcceleratorUtil.get_torch_platform("MUSA_GPU")
    (torch.path / "torch_npu.py").write_text("")
    with pytest.raises(UsageError, match=r"torch has no module torch\.npu here, nor with torch_npu"):
        AcceleratorUtil.get_torch_platform("NPU")
    del sys.modules["torch_npu"]


def test_an_unknown_type_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="there is no accelerator type 'TPU' in this process"):
        AcceleratorUtil.get_torch_platform("TPU")


@pytest.mark.torch
def test_the_plug_in_of_a_back_end_need_not_be_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "gloo" in process_groups.backends("oneccl_that_is_not_installed")
    import torch.distributed as dist

    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "oneccl_here.py").write_text("import torch\ntorch.distributed.Backend._plugins['MYCCL'] = None\n")
    monkeypatch.setattr(dist.Backend, "_plugins", {})
    assert "myccl" in process_groups.backends("oneccl_here")
