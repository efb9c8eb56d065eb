"""Admission of frames by the key of their connection and their identity."""

from __future__ import annotations

from keyed_kit import ListGate

from rlinf_actors.net.admission import Admission
from rlinf_actors.security.members import LOCAL, Member


def make(*names: str, kept: int = 100) -> tuple[Admission, ListGate]:
    gate = ListGate()
    for name in names:
        gate.members[f"key-{name}"] = Member("driver", name)
    return Admission(gate, kept), gate


def test_frame_of_an_unadmitted_key_is_counted_and_owns_no_identity() -> None:
    admission, _ = make("ann")
    assert not admission.admits(b"p", "key-bob")
    assert admission.dropped == 1
    assert admission.member_of(b"p") is None
    assert admission.admits(b"p", "key-ann")
    assert admission.member_of(b"p") == Member("driver", "ann")


def test_an_identity_stays_with_its_first_member() -> None:
    admission, _ = make("ann", "bob")
    assert admission.admits(b"p", "key-ann")
    assert not admission.admits(b"p", "key-bob")
    assert not admission.admits(b"p", "")  # from the unix socket
    assert admission.stolen == 2
    assert admission.admits(b"p", "key-ann")


def test_identity_from_a_unix_socket_is_local_and_cannot_be_taken_over() -> None:
    admission, _ = make("ann")
    assert admission.admits(b"p", "")
    assert admission.member_of(b"p") == LOCAL
    assert not admission.admits(b"p", "key-ann")


def test_a_member_with_a_new_key_keeps_its_identities() -> None:
    admission, gate = make("ann", "bob")
    assert admission.admits(b"p", "key-ann")
    gate.members["key-new"] = Member("driver", "ann")
    assert admission.admits(b"p", "key-new")  # while both keys are valid
    assert admission.admits(b"p", "key-ann")
    del gate.members["key-ann"]
    assert admission.member_of(b"p") is None
    assert admission.admits(b"p", "key-new")
    assert admission.member_of(b"p") == Member("driver", "ann")


def test_the_identity_of_a_revoked_key_is_free() -> None:
    admission, gate = make("ann", "bob")
    assert admission.admits(b"p", "key-ann")
    del gate.members["key-ann"]
    assert not admission.admits(b"p", "key-ann")
    assert admission.admits(b"p", "key-bob")


def test_table_keeps_the_most_recently_used_identities() -> None:
    admission, _ = make("ann", "bob", kept=2)
    assert admission.admits(b"1", "key-ann")
    assert admission.admits(b"2", "key-ann")
    assert admission.admits(b"1", "key-ann")  # used again
    assert admission.admits(b"3", "key-ann")
    assert admission.member_of(b"2") is None
    assert admission.member_of(b"1") is not None
    assert admission.member_of(b"3") is not None
