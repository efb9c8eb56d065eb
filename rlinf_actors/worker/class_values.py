"""Attributes of the Worker class that are found when they are read: accelerator type, torch platform, logger.

In a worker they come from its placement. In any other process, such as a driver, they come from the machine on which
the process runs. Nothing is loaded before an attribute is read: no torch, no vendor's library.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from logging import Logger
from typing import Any, Generic, TypeVar

from rlinf_actors.model import accelerator_table
from rlinf_actors.model.hardware import AcceleratorType
from rlinf_actors.worker import context as worker_context

T = TypeVar("T")


class ClassValue(Generic[T]):
    """An attribute that is computed when it is read, on the class or on an instance. An instance may set its own."""

    def __init__(self, read: Callable[[], T]) -> None:
        self._read = read

    def __get__(self, instance: object, owner: type | None = None) -> T:
        return self._read()


def accelerator_type() -> AcceleratorType:
    """Return the type of the accelerators of this process: those of the worker's placement, else of the machine."""
    context = worker_context.current()
    return worker_context.accelerator_type(context.environ) if context else _of_this_machine()


def torch_platform() -> Any:
    """Return torch's module for the accelerators of this process, such as ``torch.cuda``; None without accelerators."""
    kind = accelerator_type()
    return None if kind is AcceleratorType.NO_ACCEL else accelerator_table.torch_platform(kind)


def torch_device_type() -> str | None:
    """Return torch's name for the accelerators of this process, such as "cuda"; None without accelerators."""
    kind = accelerator_type()
    return None if kind is AcceleratorType.NO_ACCEL else accelerator_table.facts_of(kind).torch_device_type


def logger() -> Logger:
    """Return the logger of this worker; in a driver the logger of the driver."""
    context = worker_context.current()
    return worker_context.make_logger(context.address.get_name()) if context else worker_context.driver_logger()


@functools.cache  # looks for files of the vendors, and scripts ask in loops
def _of_this_machine() -> AcceleratorType:
    from rlinf_actors.hardware.accelerators import AcceleratorUtil

    return AcceleratorUtil.get_accelerator_type()
