"""What becomes of a configuration that was read again (SIGHUP): pure."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from agentd.config import Config

RELOADABLE = ("env", "labels", "stop_grace_s")
"""Fields that change at once: for workers that start from now on, for the next hello, for the next stop."""
_OF_NO_EFFECT = ("files",)


@dataclass(frozen=True)
class Changes:
    """What a fresh configuration changes.

    Attributes:
        config: what holds from now on.
        changed: names of fields that differ.
        restart: those of them that hold only after a restart.
    """

    config: Config
    changed: tuple[str, ...]
    restart: tuple[str, ...]


def take_over(current: Config, fresh: Config) -> Changes:
    """Take what can change of *fresh*; the rest stays as it is in *current*."""
    changed = tuple(
        field.name for field in fields(Config) if getattr(fresh, field.name) != getattr(current, field.name)
    )
    restart = tuple(name for name in changed if name not in (*RELOADABLE, *_OF_NO_EFFECT))
    return Changes(replace(current, **{name: getattr(fresh, name) for name in RELOADABLE}), changed, restart)
