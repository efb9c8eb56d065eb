"""A group's handle on its way to another process: what it carries, and the handle that is made of it there. Any thread.

The class does not travel: a process that cannot import it can still call the group. Nothing is asked when a handle
arrives. Its first use looks the group up at the head, and what is sent meanwhile waits in order.
"""

from __future__ import annotations

import asyncio

import msgspec

from rlinf_actors.cluster.attach import worker_job
from rlinf_actors.errors import ProtocolError, SerializationError, UsageError
from rlinf_actors.group import detail
from rlinf_actors.group.control import GroupControl
from rlinf_actors.group.names import ClassFacts, Method


class HandleState(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a handle carries, as MessagePack; fields are only ever added, with defaults.

    Attributes:
        namespace, name: of the group.
        launch: what tells it from a namesake.
        cls: name of the worker class.
        methods: names of its public methods; `flagged` has those that are special in some way.
        own: the methods that the user's classes define, by their positions in `methods`.
        private: names of the private methods.
        size: number of ranks.
        detail: the record of the group (group.detail).
        wait_s: how long (seconds) the head may take to hear of the launch; 0 where it has answered that.
    """

    namespace: str
    name: str
    launch: str
    cls: str
    methods: list[str]
    own: list[int]
    private: list[str]
    size: int
    detail: str
    flagged: dict[str, Method] = {}
    wait_s: float = 0.0


def state_of(control: GroupControl) -> bytes:
    """Return what a handle of this group carries.

    Raises:
        SerializationError: it is not known yet which group it is.
    """
    group, facts = control.group, control.facts
    if group.takes_running and not group.found:
        raise SerializationError(
            f"the launch of group {group.name!r} has not been answered, and with get_if_exists it may be another group "
            "that is running: await the group first"
        )
    methods = list(facts.methods)
    state = HandleState(
        group.namespace,
        group.name,
        group.launch,
        facts.name,
        methods,
        [number for number, name in enumerate(methods) if name in facts.own],
        sorted(facts.private),
        control.world_size,
        group.detail,
        {name: method for name, method in facts.methods.items() if method != Method()},
        0.0 if group.found else group.patience_s,
    )
    return msgspec.msgpack.encode(state)


def control_of(carried: bytes) -> GroupControl:
    """Return the operations of a group of which a handle arrived. Asks nobody.

    Raises:
        UsageError: no Cluster is running in this process.
        ProtocolError: it is something else than `state_of` returns.
    """
    from rlinf_actors.cluster.cluster import Cluster

    try:
        state = msgspec.msgpack.decode(carried, type=HandleState)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ProtocolError(f"what arrived is no handle of a group: {error}") from error
    job = worker_job()
    runtime = job.runtime if job is not None else Cluster.current().runtime
    described = detail.decode(state.detail, state.name)
    nodes = described.nodes if len(described.nodes) == state.size else ["its node"] * state.size
    group = runtime.groups.arrived(
        state.namespace,
        state.name,
        state.launch,
        nodes,
        state.wait_s,
        job.connected if job is not None else _in_session,
    )
    if not group.detail:
        group.detail = state.detail
    if runtime.namespace != state.namespace:
        group.fail(
            UsageError(
                f"group {state.name!r} belongs to namespace {state.namespace!r}, and this process to "
                f"{runtime.namespace!r}: a group is called by its own job only"
            )
        )
    facts = ClassFacts(
        state.cls,
        {name: state.flagged.get(name, Method()) for name in state.methods},
        frozenset(state.methods[number] for number in state.own),
        frozenset(state.private),
    )
    return GroupControl(runtime, group, facts)


async def _in_session() -> None:
    """A driver is in session with the head from the start of its Cluster on."""
    await asyncio.sleep(0)
