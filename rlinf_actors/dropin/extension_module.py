"""`rlinf.scheduler.cluster.load_user_extension_module`."""

from __future__ import annotations

import logging

from rlinf_actors.hardware.extensions import load_module
from rlinf_actors.settings import Settings


def load_user_extension_module(logger: logging.Logger | None = None) -> None:
    """Import the module that RLINF_EXT_MODULE names, and call its ``register()``, once in each process.

    Workers and the hardware probe do so by themselves. *logger* is not used.

    Raises:
        ConfigError: the module cannot be imported, or its ``register`` is missing or raised.
    """
    name = Settings.load().ext_module
    if name is not None:
        load_module(name)
