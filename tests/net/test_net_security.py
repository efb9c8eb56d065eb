"""How each kind of endpoint is protected."""

from __future__ import annotations

import pytest

from rlinf_actors.errors import ConfigError
from rlinf_actors.net.socket_security import Mechanism, Proof, Security
from rlinf_actors.security.job import job_pair
from rlinf_actors.security.keyfile import KeyFile
from rlinf_actors.security.keypair import KeyPair

OURS, HEAD = KeyPair.make(), KeyPair.make()
KEYED = Security.of(KeyFile("driver", "ann", OURS, HEAD.public))


@pytest.mark.parametrize("verb", ["listen on", "connect to"])
@pytest.mark.parametrize(
    "endpoint", ["tcp://10.0.0.1:6380", "tcp://0.0.0.0:1", "tcp://[::]:1", "tcp://*:1", "tcp://x:1"]
)
def test_tcp_outside_loopback_needs_keys(endpoint: str, verb: str) -> None:
    with pytest.raises(ConfigError, match=f"refusing to {verb} .*rlinf-actors keys init"):
        Security().mechanism(endpoint, verb)
    assert KEYED.mechanism(endpoint, verb) is Mechanism.CURVE
    assert Security(insecure_test_network=True).mechanism(endpoint, verb) is Mechanism.PLAIN


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:0", "tcp://localhost:1", "tcp://[::1]:5", "tcp://127.8.1.2:3"])
def test_loopback_needs_a_key_too(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="refusing to listen on"):
        Security().mechanism(endpoint, "listen on")
    assert KEYED.mechanism(endpoint, "listen on") is Mechanism.CURVE
    assert Security(True, OURS, HEAD.public).mechanism(endpoint, "connect to") is Mechanism.CURVE


def test_unix_sockets_need_no_key() -> None:
    for security in (Security(), KEYED):
        assert security.mechanism("ipc:///run/x", "listen on") is Mechanism.IPC
        assert security.proof("ipc:///run/x") is None
        assert security.proof("ipc:///run/x", "token") is None


def test_head_is_reached_with_our_key_and_workers_with_their_jobs_key() -> None:
    assert KEYED.proof("tcp://10.0.0.1:1") == Proof(OURS, HEAD.public)
    job = job_pair("token")
    assert KEYED.proof("tcp://10.0.0.1:1", "token") == Proof(job, job.public)
    assert job != job_pair("token2")
    assert Security().proof("tcp://10.0.0.1:1", "token") == Proof(job, job.public)  # head reached by ipc
    assert Security(insecure_test_network=True).proof("tcp://10.0.0.1:1", "token") is None
    assert Security(True, OURS, HEAD.public).proof("tcp://10.0.0.1:1", "token") == Proof(job, job.public)


def test_links_to_many_workers_derive_the_key_pair_of_their_job_once(monkeypatch: pytest.MonkeyPatch) -> None:
    derived: list[bytes] = []
    of_secret = KeyPair.of_secret
    monkeypatch.setattr(KeyPair, "of_secret", lambda secret: derived.append(secret) or of_secret(secret))
    proofs = {KEYED.proof(f"tcp://10.0.0.{n}:1", "the token of a large job") for n in range(100)}
    assert (len(proofs), len(derived)) == (1, 1)


def test_a_worker_has_its_jobs_pair_if_the_cluster_has_keys() -> None:
    ipc, tcp = "ipc:///run/x", "tcp://127.0.0.1:1"
    for head in (ipc, tcp):
        assert Security.of_worker("token", HEAD.public, head, "") == Security(False, job_pair("token"), HEAD.public)
    assert Security.of_worker("token", "", ipc, "10.0.0.1") == Security(insecure_test_network=True)
    assert Security.of_worker("token", "", tcp, "") == Security(insecure_test_network=True)
    assert Security.of_worker("token", "", ipc, "") == Security()


def test_the_heads_own_key_file_is_its_server_key_too() -> None:
    assert Security.of(KeyFile("head", "head", HEAD)) == Security(False, HEAD, HEAD.public)


def test_repr_contains_no_secret() -> None:
    assert OURS.secret not in repr(KEYED) + repr(KEYED.proof("tcp://10.0.0.1:1"))
