"""OlderNames: attributes of Worker that exist only because code that was written for RLinf's scheduler uses them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from rlinf_actors.settings import EXT_MODULE
from rlinf_actors.worker.execution_times import ExecutionTimes


class _Alias:
    """An attribute that is read by a function of the instance, unless the instance sets its own value."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        self._read = read

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else self._read(instance)


class OlderNames:
    """Attributes of RLinf's Worker that RLinf's workers use, beside those that Worker documents."""

    _timers: ExecutionTimes

    _manager_proxy: Any = _Alias(lambda worker: worker.manager_proxy)

    @property
    def _timer_metrics(self) -> dict[str, float]:
        """The recorded times: seconds by tag. A worker may change the dict, or set another."""
        return self._timers.seconds

    @_timer_metrics.setter
    def _timer_metrics(self, seconds: dict[str, float]) -> None:
        self._timers = ExecutionTimes(seconds)

    def _load_user_extensions(self) -> None:
        """Load the module that RLINF_EXT_MODULE names, and call its ``register()``, once in each process.

        The library does so itself before it imports the worker class.

        Raises:
            ConfigError: the module cannot be imported, or its ``register`` is missing or raised.
        """
        module = os.environ.get(EXT_MODULE)
        if module:
            from rlinf_actors.hardware.extensions import load_module

            load_module(module)
