"""A head with keys. A key is a letter, forty times."""

from __future__ import annotations

from typing import Any

from head_kit import HeadKit, job_key

from rlinf_actors.head.commands import Refuse
from rlinf_actors.head.key_registry import OwnKeys
from rlinf_actors.wire.agent_messages import Welcome
from rlinf_actors.wire.client_messages import GetNodes, Launched
from rlinf_actors.wire.key_messages import AddKey, Enroll, Enrolled, GetKeys, Keys, KeyState, RevokeKey


def key(letter: str) -> str:
    return letter * 40


OWN = OwnKeys(key("H"), key("D"), "here")


class KeysKit(HeadKit):
    """Peer "admin" is local; others get keys by `give`."""

    def __init__(self, own: OwnKeys = OWN, **more: Any) -> None:
        super().__init__(own=own, **more)
        self.keyed["here"] = own.driver

    def give(self, peer: str, letter: str, name: str = "", role: str = "agent") -> None:
        """List a key for a member; *peer* uses it from now on."""
        answer = self.ask("admin", AddKey(key(letter), role, name or peer.removeprefix("a:"), "me"))
        assert isinstance(answer, Keys), answer
        self.keyed[peer] = key(letter)

    def token(self, letter: str, name: str, role: str = "agent", seconds: float = 900.0) -> Any:
        """Make a join token; its holder is peer "join"."""
        self.keyed["join"] = key(letter)
        return self.ask("admin", AddKey(key(letter), role, name, "me", seconds))

    def enroll(self, letter: str) -> Enrolled | Any:
        return self.ask("join", Enroll(key(letter)))

    def revoke(self, name: str, **more: Any) -> Any:
        return self.ask("admin", RevokeKey(name, "me", **more))

    def listed(self, peer: str = "admin") -> dict[str, KeyState]:
        """The listed keys, by their letters."""
        answer = self.ask(peer, GetKeys())
        assert isinstance(answer, Keys), answer
        return {state.public[0]: state for state in answer.keys}

    def good(self) -> str:
        """The letters of the keys that are admitted."""
        return "".join(sorted(letter for letter in self.listed() if self.head.admit(key(letter), self.wall)))


def two_jobs() -> KeysKit:
    """Nodes n0 (the head's own) and n1, drivers "ann" and "bob", a worker of ann's job."""
    kit = KeysKit()
    kit.node("n0", is_head=True)
    kit.give("a:n1", "a", "n1")
    assert isinstance(kit.node("n1"), Welcome)
    for name, letter in (("ann", "A"), ("bob", "B")):
        kit.give(name, letter, role="driver")
        assert isinstance(kit.driver(name, namespace=name), Welcome)
    kit.ask("ann", GetNodes(2))
    assert isinstance(kit.launch("g", [0, 1], "ann", "ann"), Launched)
    kit.keyed["w"] = job_key("token1")
    return kit


def refused(answer: object) -> str:
    assert isinstance(answer, Refuse), answer
    assert answer.kind == "authentication", answer
    return answer.text
