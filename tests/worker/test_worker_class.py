"""The Worker class outside of a group: what it refuses, and child members."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
import types

import pytest

from rlinf_actors import AcceleratorType, UsageError, Worker, WorkerAddress
from rlinf_actors.worker import class_values
from rlinf_actors.worker.context import make_logger


class Mine(Worker):
    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)


@pytest.fixture(autouse=True)
def current_worker(monkeypatch):
    """Constructing a member makes it the process's current worker; that ends with the test."""
    monkeypatch.setattr(Worker, "current_worker", None)


def test_constructing_it_directly_says_how_to_launch_it():
    with pytest.raises(RuntimeError, match=r"Mine.create_group\(\.\.\.\)\.launch\(cluster\)"):
        Mine()
    with pytest.raises(UsageError):
        Worker()


def test_class_attributes_in_a_driver_without_accelerators(monkeypatch):
    monkeypatch.setattr(class_values, "_of_this_machine", lambda: AcceleratorType.NO_ACCEL)
    assert Worker.current_worker is None
    assert Worker.accelerator_type is AcceleratorType.NO_ACCEL
    assert Worker.torch_device_type is None
    assert Worker.torch_platform is None


@pytest.mark.torch
def test_class_attributes_in_a_driver_are_those_of_its_machine(monkeypatch):
    import torch

    monkeypatch.setattr(class_values, "_of_this_machine", lambda: AcceleratorType.NV_GPU)
    assert Worker.accelerator_type is AcceleratorType.NV_GPU
    assert Worker.torch_device_type == "cuda"
    assert Worker.torch_platform is torch.cuda


def test_accelerators_of_a_drivers_machine_are_looked_for_when_they_are_read():
    look = "import sys, rlinf_actors; rlinf_actors.Worker; print('rlinf_actors.hardware.accelerators' in sys.modules)"
    read = look.replace("Worker;", "Worker.torch_platform;")
    said = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout for code in (look, read)
    ]
    assert said == ["False\n", "True\n"]


def test_a_drivers_logger_writes_to_stderr_until_the_program_configures_logging(monkeypatch, capsys):
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.getLogger("rlinf_actors.driver"), "handlers", [])
    Worker.logger.info("to stderr")
    seen = io.StringIO()
    monkeypatch.setattr(logging.root, "handlers", [logging.StreamHandler(seen)])
    Worker.logger.info("to the root")
    assert "to stderr" in capsys.readouterr().err
    assert seen.getvalue() == "to the root\n"


def test_a_worker_may_set_a_logger_of_its_own():
    child = Mine(parent_address=WorkerAddress("g", 0), world_size=4, rank=1)
    child.logger = logging.getLogger("mine")
    assert child.logger is logging.getLogger("mine")
    assert Worker.logger is not child.logger


def test_a_child_of_a_worker_is_a_member():
    child = Mine(parent_address=WorkerAddress("g", 0), world_size=4, rank=1)
    assert child.worker_address == WorkerAddress("g", (0, 1))
    assert repr(child) == "g:0(rank=1)"
    assert "Mine object at" in repr(object.__new__(Mine))
    assert (child.get_name(), child._rank, child._world_size, child.get_parent_rank()) == ("g:0:1", 1, 4, 0)
    with pytest.raises(UsageError, match="g:0:1 is a child process of one"):
        _ = child.manager_proxy
    with pytest.raises(UsageError, match="g:0:1 is a child process of a worker: call keep_for_stop"):
        child.keep_for_stop(1)
    with pytest.raises(UsageError, match="lease_page needs a worker of a group"):
        _ = child.lease_page
    port = child.acquire_free_port(max_port_num=40_000)
    assert 1023 < port <= 40_000
    child._own_ports.close()


def test_timers_and_logs_of_a_child(caplog):
    child = Mine(parent_address=WorkerAddress("g", 0), world_size=1, rank=0)
    with child.worker_timer("tag"):
        pass

    def by_method_name():
        with child.worker_timer():
            pass

    by_method_name()
    assert set(child.pop_execution_times()) == {"tag", "by_method_name"}
    with pytest.raises(ValueError, match="recorded tags: none"):
        child.pop_execution_time("tag")


def test_older_code_changes_the_recorded_times_itself():
    child = Mine(parent_address=WorkerAddress("g", 0), world_size=1, rank=0)
    with child.worker_timer("tag", trace=False):
        pass
    child._timer_metrics["tag"] = child._timer_metrics.get("tag", 0.0) + 2.0
    child._timer_metrics["other"] = 1.0
    assert child.pop_execution_times(["tag", "none"])["tag"] >= 2.0
    assert child.pop_execution_times() == {"other": 1.0} == child.pop_execution_times() | {"other": 1.0}
    bare = object.__new__(Mine)
    bare._timer_metrics = {}
    with bare.worker_timer("tag"):
        pass
    assert list(bare._timer_metrics) == ["tag"]


def test_manager_proxy_may_be_replaced_under_its_older_name():
    bare = object.__new__(Mine)
    bare._manager_proxy = "another"
    assert bare._manager_proxy == "another"


def test_extension_module_is_loaded_under_the_older_name(monkeypatch):
    module = types.ModuleType("older_extension")
    calls = []
    module.register = lambda: calls.append("registered")
    monkeypatch.setitem(sys.modules, "older_extension", module)
    bare = object.__new__(Mine)
    bare._load_user_extensions()
    monkeypatch.setenv("RLINF_EXT_MODULE", "older_extension")
    bare._load_user_extensions()
    bare._load_user_extensions()
    assert calls == ["registered"]


def test_log_methods_take_the_message_by_name(monkeypatch):
    child = Mine(parent_address=WorkerAddress("g", 0), world_size=1, rank=0)
    child._logger = logging.Logger("mine")
    records = []
    child._logger.addHandler(handler := logging.Handler())
    monkeypatch.setattr(handler, "emit", records.append)
    for log in (child.log_debug, child.log_info, child.log_warning, child.log_error):
        log(msg="100 %s")
    child.log_on_first_rank(msg="first")
    child.log_on_last_rank(msg="last")
    assert [record.getMessage() for record in records] == ["100 %s"] * 4 + ["first", "last"]
    assert {record.funcName for record in records} == {"test_log_methods_take_the_message_by_name"}


@pytest.mark.parametrize(("environ", "level", "said"), [
    ({}, "INFO", ""),
    ({"LOGLEVEL": "verbose"}, "INFO", ""),
    ({"RLINF_LOG_LEVEL": "debug"}, "DEBUG", ""),
    ({"RLINF_LOG_LEVEL": "verbose"}, "INFO", "RLINF_LOG_LEVEL: is 'verbose'; it must be one of DEBUG, INFO"),
])  # fmt: skip
def test_the_workers_logger_has_the_configured_level(monkeypatch, capsys, environ, level, said):
    for name in ("LOGLEVEL", "RLINF_LOG_LEVEL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(logging.root, "handlers", [])  # pytest's own
    logger = make_logger(f"levels:{len(environ)}{level}{said[:1]}")
    assert logging.getLevelName(logger.level) == level
    assert said in capsys.readouterr().err
