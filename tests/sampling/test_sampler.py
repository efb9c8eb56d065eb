"""Rounds of questions with a driver's key, which may ask for its own jobs only, and to a head that fails."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

import board_kit
import pytest

from rlinf_actors.errors import AuthenticationError
from rlinf_actors.net.rpc import ControlServer
from rlinf_actors.net.socket_security import Security
from rlinf_actors.net.zmq_network import ZmqNetwork
from rlinf_actors.sampling.sampler import Sampler
from rlinf_actors.wire.client_messages import GetStatus
from rlinf_actors.wire.control_codec import Body, Envelope, Request
from rlinf_actors.wire.node_questions import AskNode, NodeAnswered

Answer = Callable[[Body], "Body | str"]
"""Returns the answer to a request, or the text of a refusal."""


@contextlib.contextmanager
def sampler_of(place, answer: Answer) -> Iterator[Sampler]:
    """A Sampler, and the head that it asks."""

    def came(peer: bytes, envelope: Envelope) -> None:
        assert isinstance(envelope, Request)
        found = answer(envelope.body)
        if isinstance(found, str):
            server.fail(peer, envelope.id, "authentication", found)
        else:
            server.reply(peer, envelope.id, found)

    place.chmod(0o700)
    network = ZmqNetwork(asyncio.get_running_loop(), Security())
    server = ControlServer(network, came)
    sampler = Sampler(network, server.bind(f"ipc://{place}/head"), 1.0)
    try:
        yield sampler
    finally:
        sampler.close()
        server.close()
        network.close()


async def test_a_driver_asks_for_its_jobs_and_sees_their_workers(tmp_path):
    asked: list[str | None] = []

    def answer(body: Body) -> Body | str:
        if isinstance(body, GetStatus):
            return board_kit.status(hostile="x")
        assert isinstance(body, AskNode)
        asked.append(body.question.namespace)
        if body.question.namespace is None:
            return "driver 'kim' may read figures of its own jobs only"
        return NodeAnswered(board_kit.figures(1.0, 1, "x")[body.node_id])

    with sampler_of(tmp_path, answer) as sampler:
        for number in range(2):
            sample = await sampler.sample()
            assert {id: len(found.workers) for id, found in sample.figures.items()} == {"id-0": 2, "id-1": 1}
            assert sample.faults == {}
            assert asked.count("job-a") == 2 * (number + 1)
        refused = asked.count(None)
        assert 1 <= refused <= 2, "it learns from the first refusal"


async def test_a_refusal_is_raised_by_a_sample_and_is_a_part_of_a_round(tmp_path):
    with sampler_of(tmp_path, lambda body: "agent 'n' may not say GetStatus") as sampler:
        with pytest.raises(AuthenticationError, match="may not say"):
            await sampler.sample()
        assert "may not say" in (await sampler.round()).fault
