"""What becomes of a configuration that was read again (SIGHUP): pure."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from agentd.config import Config, key_of

RELOADABLE = ("env", "labels", "stop_grace_s")
"""Fields that change at once: for workers that start from now on, for the next hello, for the next stop."""
_OF_NO_EFFECT = ("files",)
"""Where it was read: nothing that this process does depends on it."""


@dataclass(frozen=True)
class Changes:
    """What a fresh configuration changes.

    Attributes:
        config: what holds from now on.
        applied: keys of agentd.toml that differ and hold now.
        restart: those that differ and hold only after a restart.
    """

    config: Config
    applied: tuple[str, ...]
    restart: tuple[str, ...]


def take_over(current: Config, fresh: Config) -> Changes:
    """Take what can change of *fresh*; the rest stays as it is in *current*."""
    changed = [
        field.name
        for field in fields(Config)
        if field.name not in _OF_NO_EFFECT and getattr(fresh, field.name) != getattr(current, field.name)
    ]
    return Changes(
        replace(current, **{name: getattr(fresh, name) for name in (*RELOADABLE, *_OF_NO_EFFECT)}),
        tuple(key_of(name) for name in changed if name in RELOADABLE),
        tuple(key_of(name) for name in changed if name not in RELOADABLE),
    )
