"""The table of roles and verbs: it is complete and has the required entries."""

from __future__ import annotations

import typing

import pytest

from rlinf_actors.security.members import LOCAL, VERBS, Member, Role, may
from rlinf_actors.wire.control_codec import Body
from rlinf_actors.wire.node_questions import AskNode, NodeQuestion
from tests.message_bounds import tagged

ROLES = [role for role in typing.get_args(Role) if role != "local"]


def test_table_has_exactly_one_entry_for_each_control_message_and_question():
    """An AskNode has the verb of its question."""
    messages = [message.__name__ for message in typing.get_args(Body) if message is not AskNode]
    assert sorted(VERBS) == sorted(messages + [tagged(question) for question in typing.get_args(NodeQuestion)])


def test_entries_name_roles_that_have_keys():
    assert {role for roles in VERBS.values() for role in roles} <= set(ROLES)


def test_local_process_may_send_every_message_and_unknown_verbs_are_refused():
    assert all(may(LOCAL, verb) for verb in VERBS)
    assert not any(may(Member(role), "Format") for role in typing.get_args(Role))


@pytest.mark.parametrize("role", ROLES)
def test_only_agents_may_send_the_messages_of_agents(role):
    agents = ("AgentHello", "WorkerReady", "WorkerExited", "WorkersHealth", "ProcessGone", "HardwareFound")
    for verb in agents:
        assert may(Member(role), verb) is (role == "agent"), verb


@pytest.mark.parametrize("role", ROLES)
def test_only_drivers_and_workers_may_use_groups(role):
    for verb in ("ClientHello", "Launch", "FindGroup", "StopGroup", "GetNodes"):
        assert may(Member(role), verb) is (role in ("driver", "worker")), verb


def test_every_role_but_a_viewer_and_a_join_token_may_press_the_emergency_stop():
    assert {role for role in ROLES if may(Member(role), "EStop")} == set(ROLES) - {"viewer", "enroll"}


def test_a_viewer_may_ask_and_nothing_else():
    asks = {"GetStatus", "GetEvents", "ReadStacks", "ReadFigures", "ReadLogs", "CheckNode"}
    assert {verb for verb in VERBS if may(Member("viewer"), verb)} == asks
