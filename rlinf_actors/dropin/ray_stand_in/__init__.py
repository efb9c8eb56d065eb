"""Stands in for `ray` where Ray is not installed: what RLinf uses of it beside its scheduler."""

from importlib import import_module
from types import ModuleType

__stand_in__ = True


def is_initialized() -> bool:
    """Return False: Ray does not run."""
    return False


def shutdown() -> None:
    """Do nothing, because Ray does not run."""


def __getattr__(name: str) -> ModuleType:
    if name in ("actor", "util"):  # Ray imports them with itself
        return import_module(f"{__name__}.{name}")
    raise AttributeError(
        f"ray.{name}: Ray is not installed here, and the stand-in of rlinf_actors.dropin has only ray.is_initialized, "
        f"ray.shutdown, ray.util.get_node_ip_address and ray.util.queue. Install ray for programs that need more of it"
    )
