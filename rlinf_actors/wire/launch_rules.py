"""Who may launch workers on a node: the node's rules (``[admit]`` and ``users`` in agentd.toml), and who asks. Pure.

The head and the agentd of the node decide by the same function, each by itself. The rules are those of the node's
administrator; what a driver's key is limited to is decided by the head alone (head.admission).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Union

import msgspec

from rlinf_actors.wire.bounds import Name, SomeOf

ANYONE = "*"
"""Stands in a list of drivers for every driver."""
LOCAL_DRIVERS = "@local"
"""Stands in a list of drivers for those without a key: processes of the head's user on the head's machine."""


class Launcher(msgspec.Struct, frozen=True, gc=False):
    """Who launches workers.

    Attributes:
        driver: name of the driver's key to which the job belongs, "" if no driver of it has a key.
        groups: the groups of drivers to which that driver belongs.
        nested: True if a worker of the job launches, and not its driver.
    """

    driver: str = ""
    groups: tuple[str, ...] = ()
    nested: bool = False

    def __str__(self) -> str:
        return f"driver {self.driver!r}" if self.driver else f"a driver without a key ({LOCAL_DRIVERS})"

    def is_in(self, drivers: Sequence[str]) -> bool:
        """Return True if one of these entries of ``[admit]`` stands for the driver."""
        own = {ANYONE, *(f"@{group}" for group in self.groups), self.driver or LOCAL_DRIVERS}
        return not own.isdisjoint(drivers)


class LaunchRules(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The rules of a node.

    Attributes:
        drivers: the drivers that may launch on the node: names of keys, ``@GROUP``, ``@local`` or ``*``; None for all.
        robots: those of them whose workers may hold robots there; None for all of them.
        nested: False if workers may not launch there, but only drivers.
        users: the drivers as whose users workers run there (``users`` in [workers]): others have none. None if every
            driver has a user, or all workers run as agentd's own.
    """

    drivers: Union[SomeOf[Name], None] = None
    robots: Union[SomeOf[Name], None] = None
    nested: bool = True
    users: Union[SomeOf[Name], None] = None

    def why_not(self, node: str, launcher: Launcher, robots: bool = False) -> str:
        """Return why *launcher* may not launch a worker on the node called *node*, with advice; "" if it may.

        *robots* is True for a worker that holds robots.
        """
        if self.drivers is not None and not launcher.is_in(self.drivers):
            return _text(f"does not admit {launcher}", node, "drivers", self.drivers)
        if robots and self.robots is not None and not launcher.is_in(self.robots):
            return _text(f"does not give its robots to {launcher}", node, "robots", self.robots)
        if launcher.nested and not self.nested:
            return (
                f"node {node} admits no workers that a worker launches: nested in [admit] of its agentd.toml is false; "
                "launch them from the driver, or on another node"
            )
        if self.users is not None and launcher.driver not in self.users:
            return (
                f"node {node} has no user for {launcher}: users in [workers] of its agentd.toml has "
                f"{_named(self.users)}; launch on another node, or add the driver's key there and restart its agentd"
            )
        return ""

    def __str__(self) -> str:
        drivers = _named(self.drivers) if self.drivers is not None else "all drivers"
        robots = f"; robots: {_named(self.robots)}" if self.robots is not None else ""
        users = f"; users for: {_named(self.users)}" if self.users is not None else ""
        return f"{drivers}{robots}{users}{'' if self.nested else '; no launches by workers'}"


def _text(what: str, node: str, key: str, listed: Sequence[str]) -> str:
    return (
        f"node {node} {what}: {key} in [admit] of its agentd.toml has {_named(listed)}; launch on another node, or add "
        "the driver there and send agentd SIGHUP"
    )


def _named(drivers: Sequence[str]) -> str:
    return ", ".join(map(repr, drivers)) or "nobody (a strict agentd admits only who is listed)"
