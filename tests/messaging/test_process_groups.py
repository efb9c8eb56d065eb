"""How CollectiveGroupOptions become a back-end's own options, and how a vendor's back-end is made: by the table."""

from __future__ import annotations

import datetime
import sys
import types
from typing import Any

import pytest

from rlinf_actors.messaging import process_groups
from rlinf_actors.messaging.process_groups import CollectiveGroupOptions
from rlinf_actors.model import accelerator_table
from rlinf_actors.model.accelerator_table import ACCELERATOR_TABLE, AcceleratorFacts, ProcessGroupFacts, group_facts
from rlinf_actors.model.hardware import AcceleratorType

OPTIONS = CollectiveGroupOptions(accel_max_ctas=8, is_high_priority_stream=True)


def test_options_are_empty_until_one_is_set():
    assert CollectiveGroupOptions().is_empty_options()
    assert not OPTIONS.is_empty_options()


@pytest.fixture
def vendor(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A vendor's module with a process group of its own, and its row."""

    class Config:
        max_ctas = 0

    class Options:
        def __init__(self) -> None:
            self.is_high_priority_stream = False
            self._timeout: Any = None
            self.config = Config()

    class Group:
        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            self.told = (rank, size, options)

    module = types.ModuleType("vendor_dist")
    Group.Options = Options  # type: ignore[attr-defined]
    module.Group = Group  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vendor_dist", module)
    facts = ProcessGroupFacts(
        "vendor_dist:Group",
        {"is_high_priority_stream": "is_high_priority_stream", "accel_max_ctas": "config.max_ctas"},
        variables={"VENDOR_QUIET": "1"},
    )
    row = AcceleratorFacts("V", "vccl", "v", "", group=facts)
    monkeypatch.setitem(accelerator_table._rows, AcceleratorType.named("V_GPU"), row)
    return module


def test_options_become_the_ccls_options(vendor: types.ModuleType) -> None:
    made = process_groups.group_options("vccl", OPTIONS, datetime.timedelta(seconds=3))
    assert (made.is_high_priority_stream, made.config.max_ctas, made._timeout.seconds) == (True, 8, 3)


def test_an_option_that_this_version_lacks_is_an_error(vendor: types.ModuleType) -> None:
    del vendor.Group.Options().config.__class__.max_ctas
    with pytest.raises(ValueError, match="asks for accel_max_ctas=8, which this torch's vccl has not"):
        process_groups.group_options("vccl", OPTIONS)


def test_a_back_end_without_options_gets_none() -> None:
    assert process_groups.group_options("mccl", OPTIONS) is None
    assert process_groups.group_options("of nobody", OPTIONS) is None


def test_every_field_of_a_row_is_an_option() -> None:
    fields = set(CollectiveGroupOptions.__dataclass_fields__)
    for facts in ACCELERATOR_TABLE.values():
        assert set(facts.group.options) <= fields
    assert group_facts("nccl").timeout_s == 600.0
    assert group_facts("gloo").timeout_s == 1800.0


@pytest.mark.torch
@pytest.mark.parametrize("extended", [False, True])
def test_a_vendors_back_end_is_made_on_a_store(
    vendor: types.ModuleType, monkeypatch: pytest.MonkeyPatch, extended: bool
) -> None:
    import torch.distributed as dist

    told: list[Any] = []

    def create(*args: Any) -> str:
        told.extend(args)
        return "the group"

    plugin = dist.Backend._BackendPlugin(create, extended)  # type: ignore[attr-defined]
    monkeypatch.setitem(dist.Backend._plugins, "VCCL", plugin)  # type: ignore[attr-defined]
    store = dist.HashStore()
    made = process_groups.make(
        "vccl", store, 1, 2, timeout_s=5.0, ip=process_groups.LOOPBACK, options=OPTIONS, name="job-1"
    )
    assert made == "the group"
    (told[0].store if extended else told[0]).set("key", "value")
    assert store.check(["job-1/key"]), "another job's members would look elsewhere"
    if not extended:
        assert told[1:] == [1, 2, datetime.timedelta(seconds=5)]
        return
    details, options = told
    assert (details.group_rank, details.group_size, details.timeout.seconds) == (1, 2, 5)
    assert details.global_ranks_in_group == [0, 1]
    assert details.group_id == "job-1"
    assert options.config.max_ctas == 8


@pytest.mark.torch
def test_torchs_own_class_is_made_with_its_environment(
    vendor: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    import torch.distributed as dist

    seen: list[str | None] = []
    made = vendor.Group.__init__

    def init(self: Any, *args: Any) -> None:
        seen.append(os.environ.get("VENDOR_QUIET"))
        made(self, *args)

    monkeypatch.setattr(vendor.Group, "__init__", init)
    group = process_groups.make(
        "vccl", dist.HashStore(), 0, 2, timeout_s=5.0, ip=process_groups.LOOPBACK, options=OPTIONS
    )
    assert group.told[:2] == (0, 2)
    assert seen == ["1"]
    assert "VENDOR_QUIET" not in os.environ


def test_options_are_kept():
    options = CollectiveGroupOptions(accel_max_ctas=4, use_ring_broadcast=True)
    assert options == CollectiveGroupOptions(None, 4, None, False, True)
    assert CollectiveGroupOptions() != options


# --- abort, by the version of torch ---


class Torch25:
    """ProcessGroupNCCL of torch 2.2 to 2.5: only `_shutdown`, which aborts."""

    def __init__(self):
        self.called = []

    def _shutdown(self):
        self.called.append("_shutdown")


class Torch26(Torch25):
    """ProcessGroupNCCL since torch 2.6; since 2.7 `_shutdown` waits for the kernels."""

    def abort(self):
        self.called.append("abort")


class Torch213:
    """Since all back-ends of torch have these."""

    def __init__(self):
        self.called = []

    def shutdown(self):
        self.called.append("shutdown")

    def abort(self):
        self.called.append("abort")


class Vendor:
    """A vendor's copy of an old ProcessGroupNCCL."""

    def __init__(self):
        self.called = []

    def _abort(self):
        self.called.append("_abort")


@pytest.mark.parametrize(
    ("kind", "method"), [(Torch25, "_shutdown"), (Torch26, "abort"), (Torch213, "abort"), (Vendor, "_abort")]
)
def test_abort_takes_the_method_that_does_not_wait(kind, method):
    group = kind()
    process_groups.abort(group)
    assert group.called == [method]


def test_abort_of_a_group_without_such_a_method_does_nothing():
    process_groups.abort(object())


def test_abort_of_a_group_that_has_failed_by_itself_is_no_error():
    class Failed:
        def abort(self):
            raise RuntimeError("the communicator was aborted before")

    process_groups.abort(Failed())


def test_this_torch_has_a_method_that_aborts_nccl():
    dist = pytest.importorskip("torch.distributed")
    if not dist.is_nccl_available():
        pytest.skip("this torch was built without NCCL")
    assert any(hasattr(dist.ProcessGroupNCCL, name) for name in process_groups.ABORTS)
