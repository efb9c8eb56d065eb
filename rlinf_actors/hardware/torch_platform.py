"""Find torch's module for an accelerator type. Imports torch, and the vendor's plug-in if needed, when called."""

from __future__ import annotations

import importlib
from typing import Any

from rlinf_actors.errors import UsageError
from rlinf_actors.model.accelerator_table import facts_of
from rlinf_actors.model.hardware import AcceleratorType


def torch_platform(accelerator: AcceleratorType | str) -> Any:
    """Import torch and return its module for devices of an accelerator type, such as ``torch.cuda``.

    Raises:
        ConfigError: this process does not know the type.
        ImportError: torch is not installed.
        UsageError: this torch has no such module, and the vendor's plug-in is not installed or does not provide it.
    """
    facts = facts_of(accelerator)
    name, plugin = facts.torch_device_type, facts.torch_plugin
    torch = importlib.import_module("torch")
    if not hasattr(torch, name) and plugin:
        try:
            importlib.import_module(plugin)
        except Exception as error:
            raise UsageError(
                f"torch has no module torch.{name} here, and the vendor's plug-in {plugin} cannot be imported: "
                f"{type(error).__name__}: {error}"
            ) from error
    if not hasattr(torch, name):
        raise UsageError(f"torch has no module torch.{name} here" + (f", nor with {plugin}" if plugin else ""))
    return getattr(torch, name)
