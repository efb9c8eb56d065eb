"""A request without an answer says why: another key, another program, or no listener at the head's address."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest
from keyed_kit import Guarded, guarded
from tcp_kit import HOST, receive, tcp_server

from rlinf_actors.errors import ClusterTimeoutError, WrongServerError
from rlinf_actors.net.link import Diagnosis, secret_identity
from rlinf_actors.net.reachability import HeadVerifier
from rlinf_actors.net.rpc import ControlClient, KeyRefusedError
from rlinf_actors.net.socket_security import Security
from rlinf_actors.net.zmq_network import ZmqNetwork
from rlinf_actors.security.keypair import KeyPair
from rlinf_actors.wire.client_messages import GetStatus


@pytest.fixture
async def world(rlinf_leak_check, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Guarded]:
    monkeypatch.setattr("rlinf_actors.net.reachability.SURE_S", 0.1)
    for name in ("CONNECT_S", "GREETING_S"):  # long, so that a stall of this process does not count as silence
        monkeypatch.setattr(f"rlinf_actors.net.reachability.{name}", 10.0)
    with guarded() as made:
        yield made


class AskingProcess:
    """A process with a listed key."""

    def __init__(self, world: Guarded, endpoint: str, head: str = "", pair: KeyPair | None = None) -> None:
        security = Security(pair=pair or world.gate.enlist(), head=head or world.pair.public)
        self.client = ControlClient(world.net(security), endpoint, secret_identity("x"), lambda notice: None)

    async def error_text(self, kind: type[Exception], timeout: float | None = None) -> str:
        try:
            with pytest.raises(kind) as error:
                await self.client.request(GetStatus(), timeout)
        finally:
            self.client.close()
        return str(error.value)


@contextlib.asynccontextmanager
async def program(answer: bytes) -> AsyncIterator[str]:
    """A program that answers each connection with *answer* and closes it."""

    async def serve(connection: socket.socket) -> None:
        if len(await receive(connection, 10)) == 10:
            await asyncio.get_running_loop().sock_sendall(connection, answer)

    async with tcp_server(serve) as port:
        yield f"tcp://{HOST}:{port}"


async def test_head_with_another_key_is_reported_as_another_server(world: Guarded) -> None:
    text = await AskingProcess(world, world.bind(), KeyPair.make().public).error_text(WrongServerError)
    assert text.startswith(f"this is not the head, at {world.endpoint}: what listens there does not have the key")


async def test_error_names_the_key_that_is_not_listed(world: Guarded) -> None:
    pair = KeyPair.make()
    text = await AskingProcess(world, world.bind(), pair=pair).error_text(KeyRefusedError)
    assert f"this process's key ({pair.public[:8]}) is not admitted there: it is not listed, or revoked" in text


async def test_tls_server_is_reported_as_another_program(world: Guarded) -> None:
    async with program(b"\x15\x03\x01\x00\x02\x02\x46") as endpoint:
        text = await AskingProcess(world, endpoint).error_text(WrongServerError)
        assert text == f"this is not the head, at {endpoint}: another program listens there, not a head"


async def test_timeout_at_a_listener_that_closes_connections_says_so(
    world: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, diagnose = asyncio.Event(), ZmqNetwork.diagnose

    async def watched(network: ZmqNetwork, endpoint: str) -> Diagnosis:
        found = await diagnose(network, endpoint)
        looked.set()
        return found

    monkeypatch.setattr(ZmqNetwork, "diagnose", watched)
    async with program(b"") as endpoint:
        asking = AskingProcess(world, endpoint)
        await asyncio.wait_for(looked.wait(), 20)
        text = await asking.error_text(ClusterTimeoutError, 0.05)
        assert "something there closes each connection at once" in text


async def test_timeout_without_a_listener_says_so(world: Guarded) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        endpoint = "tcp://{}:{}".format(*bound.getsockname())
        text = await AskingProcess(world, endpoint).error_text(ClusterTimeoutError, 0.05)
        assert text == (
            f"the head at {endpoint} did not answer GetStatus within 0.05 s; nobody listens there: start the head, or "
            "correct the address"
        )


async def test_timeout_at_a_silent_listener_says_so(world: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlinf_actors.net.reachability.GREETING_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = "tcp://{}:{}".format(*silent.getsockname())
        text = await AskingProcess(world, endpoint).error_text(ClusterTimeoutError, 0.05)
        assert "something takes connections there and says nothing" in text


async def test_failed_diagnosis_is_reported_and_the_next_handshake_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlinf_actors.net.reachability.SURE_S", 0.0)
    loop, reported, other = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    loop.set_exception_handler(
        lambda _, context: reported.set() if isinstance(context["exception"], KeyError) else None
    )
    looks: list[Exception | Diagnosis] = [KeyError("a bug"), Diagnosis.OTHER]

    class Eyes:
        async def diagnose(self, endpoint: str) -> Diagnosis:
            look = looks.pop(0)
            if isinstance(look, Exception):
                raise look
            return look

    verifier = HeadVerifier(Eyes(), "tcp://127.0.0.1:1", lambda error: other.set(), explains=True)  # type: ignore[arg-type]
    verifier.failed("no answer", for_good=False)
    await reported.wait()
    verifier.failed("no answer", for_good=False)
    await other.wait()
