"""Who may say what: the table is whole, and says what it must."""

from __future__ import annotations

import typing

import pytest

from rlinf_actors.security.members import LOCAL, VERBS, Member, Role, may
from rlinf_actors.wire.control_codec import Body

ROLES = [role for role in typing.get_args(Role) if role != "local"]


def test_every_control_message_has_an_entry_and_there_are_no_others():
    assert set(VERBS) == {message.__name__ for message in typing.get_args(Body)}


def test_entries_name_roles_that_have_keys():
    assert {role for roles in VERBS.values() for role in roles} <= set(ROLES)


def test_a_local_process_may_say_everything_and_nobody_an_unknown_verb():
    assert all(may(LOCAL, verb) for verb in VERBS)
    assert not any(may(Member(role), "Format") for role in typing.get_args(Role))


@pytest.mark.parametrize("role", ROLES)
def test_only_an_agent_speaks_as_one(role):
    agents = ("AgentHello", "WorkerReady", "WorkerExited", "WorkersHealth", "ProcessGone", "HardwareFound")
    for verb in agents:
        assert may(Member(role), verb) is (role == "agent"), verb


@pytest.mark.parametrize("role", ROLES)
def test_only_clients_have_groups(role):
    for verb in ("ClientHello", "Launch", "FindGroup", "StopGroup", "GetNodes"):
        assert may(Member(role), verb) is (role in ("driver", "worker")), verb


def test_everybody_but_a_join_token_may_press_the_emergency_stop():
    assert {role for role in ROLES if may(Member(role), "EStop")} == set(ROLES) - {"enroll"}
