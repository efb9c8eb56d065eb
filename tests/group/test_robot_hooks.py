"""Hooks of robot workers that could not run when the robots must stop are refused at the launch."""

from __future__ import annotations

from typing import Any

import pytest

from rlinf_actors import Worker
from rlinf_actors.errors import UsageError
from rlinf_actors.group.class_facts import check_robot_hooks


def with_(**members: Any) -> type:
    return type("Env", (Worker,), members)


async def waits(*_: object) -> None: ...


REFUSED = [
    (with_(on_lease_lost=waits), "Env.on_lease_lost is an async def"),
    (with_(on_lease_lost=lambda self, hard: None), "Env.on_lease_lost cannot be called with no arguments"),
    (with_(stop_hardware=lambda self, infos: None), "Env.stop_hardware needs an instance"),
    (with_(stop_hardware=staticmethod(waits)), "Env.stop_hardware is an async def"),
    (with_(stop_hardware=staticmethod(lambda: None)), "Env.stop_hardware cannot be called with one argument"),
    (with_(stop_hardware=classmethod(lambda cls, infos, hard: None)), "Env.stop_hardware cannot be called with one"),
]


@pytest.mark.parametrize(("cls", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_hook_that_cannot_run_is_refused(cls: type, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        check_robot_hooks(cls)


@pytest.mark.parametrize(
    "members",
    [
        {},
        {"on_lease_lost": lambda self: None},
        {"on_lease_lost": staticmethod(lambda: None)},
        {"on_lease_lost": lambda self, hard=True: None},
        {"stop_hardware": staticmethod(lambda infos: None)},
        {"stop_hardware": classmethod(lambda cls, infos: None)},
        {"stop_hardware": staticmethod(lambda infos, timeout_s=0.5: None)},
    ],
)
def test_hook_that_can_run_is_not_refused(members: dict[str, Any]) -> None:
    check_robot_hooks(with_(**members))
