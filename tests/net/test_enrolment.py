"""`net.enrolment.join`: the same token works after each failure, and leaves no file behind."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import sys

import pytest

from rlinf_actors.errors import AuthenticationError, ClusterTimeoutError, UsageError
from rlinf_actors.net import enrolment
from rlinf_actors.net.rpc import KeyRefusedError
from rlinf_actors.security import keyfile
from rlinf_actors.security.job import JoinToken
from rlinf_actors.security.keyfile import KeyFile
from rlinf_actors.security.keypair import KeyPair
from rlinf_actors.wire.client_messages import GetStatus
from rlinf_actors.wire.key_messages import Enroll, Enrolled


class Head:
    """A head that admits one join token; `fails` are raised in place of its next answers, which are lost."""

    def __init__(self, monkeypatch) -> None:
        self.token = JoinToken("127.0.0.1:1", KeyPair.make().public, KeyPair.make(), "agent", "n1")
        self.listed: dict[str, Enroll] = {}
        self.ended: set[str] = set()
        self.used = False
        self.fails: list[tuple[Exception, bool]] = []  # and whether the head got the request
        monkeypatch.setattr(enrolment, "_ask", self.ask)

    def ask(self, endpoint, key, question, note):
        error, arrives = self.fails.pop(0) if self.fails else (None, True)
        answer = self.answer(key, question) if arrives else None
        if error is not None:
            raise error
        return answer

    def answer(self, key, question):
        if isinstance(question, GetStatus):
            if key.pair.public not in self.listed:
                raise KeyRefusedError("not listed")
            return None
        if key.pair != self.token.pair or self.used:
            raise KeyRefusedError("used")
        if question.public in self.listed or question.public in self.ended:
            raise UsageError("key xyz is known already: make a new one")
        self.listed[question.public] = question
        self.used = True
        return Enrolled("agent", "n1")


@pytest.fixture
def head(monkeypatch) -> Head:
    return Head(monkeypatch)


@pytest.fixture
def join(head, tmp_path):
    said: list[str] = []

    def run(**more):
        return enrolment.join(head.token, tmp_path / "keys", said.append, **more)

    run.files = lambda: sorted(os.listdir(tmp_path / "keys"))
    run.said = said
    return run


def test_key_is_made_and_listed_for_a_node_and_user(head, join):
    joined = join(user="lab", node_id="id-1")
    assert join.files() == ["agent.key"]
    assert head.listed == {joined.key.pair.public: Enroll(joined.key.pair.public, "id-1", "lab")}
    assert joined.key.node == "id-1"
    assert len(join.said) == 0


@pytest.mark.parametrize("arrives", [True, False])
def test_token_works_again_after_a_head_that_did_not_answer(head, join, arrives):
    head.fails = [(ClusterTimeoutError("no answer."), arrives)]
    with pytest.raises(ClusterTimeoutError, match="Try again with the same token"):
        join(user="lab")
    joined = join(user="lab")
    assert list(head.listed) == [joined.key.pair.public]
    assert join.files() == ["agent.key"]
    assert join().key == joined.key, "and again, after it was used"
    assert "lists the key of this machine already" in join.said[-1]


def test_used_token_gives_no_key_to_another(head, join, tmp_path):
    join()
    with pytest.raises(AuthenticationError, match=r"used already.*keys enroll n1"):
        enrolment.join(head.token, tmp_path / "thief", lambda text: None)
    assert os.listdir(tmp_path / "thief") == []


def test_interrupted_join_is_finished_by_another_token(head, join):
    head.fails = [(KeyboardInterrupt(), False)]
    with pytest.raises(KeyboardInterrupt):
        join()
    assert join.files() == ["agent.key.joining"]
    head.token = JoinToken(head.token.address, head.token.head, KeyPair.make(), "agent", "n1")
    join()
    assert join.files() == ["agent.key"]


def test_key_that_was_revoked_meanwhile_is_made_anew(head, join):
    head.fails = [(ClusterTimeoutError("no answer."), True)]
    with contextlib.suppress(ClusterTimeoutError):
        join()
    head.ended, head.listed, head.used = set(head.listed), {}, False
    assert join().key.pair.public not in head.ended
    assert join.files() == ["agent.key"]


def test_key_of_the_same_node_is_replaced(head, join):
    before = join().key
    head.used = False  # a token of `enroll --replace`
    assert join().key.pair != before.pair
    assert join.files() == ["agent.key"]


def test_key_of_another_member_is_kept(head, join, tmp_path):
    keyfile.save(tmp_path / "keys" / "agent.key", KeyFile("agent", "other", KeyPair.make(), head.token.head))
    with pytest.raises(UsageError, match=r"key of agent 'other'.*is for agent 'n1': move that file away"):
        join()
    assert not head.listed


KILLED = """
import os, sys
from pathlib import Path
from rlinf_actors.net import enrolment
from rlinf_actors.security import job
from rlinf_actors.wire.key_messages import Enrolled

steps = {number}

def counted(function):
    def run(*given, **options):
        global steps
        steps -= 1
        if steps < 0:
            os.kill(os.getpid(), 9)
        return function(*given, **options)
    return run

def ask(endpoint, key, question, note):
    print(question.public, flush=True)  # the head lists it
    return counted(Enrolled)("agent", "n1")

enrolment._ask = ask
for name in ("mkdir", "open", "fsync", "link", "unlink", "replace", "rename"):
    setattr(os, name, counted(getattr(os, name)))
enrolment.join(job.parse(sys.argv[1]), Path(sys.argv[2]), print)
"""


@pytest.mark.slow
@pytest.mark.parametrize("arrives", [True, False], ids=["its request arrives", "it does not"])
def test_join_that_is_killed_at_any_step_can_be_repeated_and_leaves_nothing(head, join, tmp_path, arrives):
    for number in itertools.count():
        shutil.rmtree(tmp_path / "keys", ignore_errors=True)
        head.listed, head.used = {}, False
        command = [sys.executable, "-c", KILLED.replace("{number}", str(number)), head.token.text(), tmp_path / "keys"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode in (0, -9), done.stderr
        listed = done.stdout.split() if arrives or done.returncode == 0 else []
        for public in listed:
            head.listed[public], head.used = Enroll(public), True
        joined = join()
        assert list(head.listed) == [joined.key.pair.public]
        assert join.files() == ["agent.key"]
        if done.returncode == 0:
            break
    assert number > 8, "it was killed at each step"
