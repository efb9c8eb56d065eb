"""The Worker class outside of a group: what it refuses, and child members."""

from __future__ import annotations

import logging

import pytest

from rlinf_actors import AcceleratorType, UsageError, Worker, WorkerAddress
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


def test_class_attributes_in_a_driver():
    assert Worker.current_worker is None
    assert Worker.accelerator_type is AcceleratorType.NO_ACCEL
    assert Worker.torch_device_type == "cpu"


@pytest.mark.torch
def test_torch_platform_in_a_driver():
    import torch

    assert Worker.torch_platform is torch.cpu


def test_a_child_of_a_worker_is_a_member():
    child = Mine(parent_address=WorkerAddress("g", 0), world_size=4, rank=1)
    assert child.worker_address == WorkerAddress("g", (0, 1))
    assert (child.get_name(), child._rank, child._world_size, child.get_parent_rank()) == ("g:0:1", 1, 4, 0)
    with pytest.raises(UsageError, match="g:0:1 is a child process of one"):
        _ = child.manager_proxy
    with pytest.raises(UsageError, match="g:0:1 is a child process of a worker: call keep_for_stop"):
        child.keep_for_stop(1)
    with pytest.raises(UsageError, match="lease_page needs a worker of a group"):
        _ = child.lease_page
    port = child.acquire_free_port()
    assert port > 0
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
    logger = make_logger(f"levels:{len(environ)}{level}{said[:1]}")
    assert logging.getLevelName(logger.level) == level
    assert said in capsys.readouterr().err
