"""Join tokens: only a complete token is accepted, and a token does not show its secret."""

from __future__ import annotations

import base64

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rlinf_actors.errors import ConfigError
from rlinf_actors.security import job
from rlinf_actors.security.job import JoinToken
from rlinf_actors.security.keypair import KeyPair

HEAD, PAIR = KeyPair.make(), KeyPair.make()
TOKEN = JoinToken("10.0.0.1:6380", HEAD.public, PAIR, "agent", "gpu-1")


@pytest.mark.parametrize("token", [TOKEN, JoinToken("[fd00::1]:1", HEAD.public, PAIR, "driver", "kim@lab")])
def test_token_is_one_word_and_parses_to_itself(token):
    assert token.text().split() == [token.text()]
    assert job.parse(f"  {token.text()}\n") == token


def test_repr_of_a_token_hides_its_secret():
    assert PAIR.secret not in repr(TOKEN) + str(TOKEN)


def test_truncated_token_is_refused_and_not_shown():
    text = TOKEN.text()
    for n in range(len(text)):
        with pytest.raises(ConfigError) as caught:
            job.parse(text[:n])
        assert text[:n][20:] == "" or text[20:n] not in str(caught.value)


@pytest.mark.parametrize(
    "token",
    [
        JoinToken("10.0.0.1:1", HEAD.public, PAIR, "head", "n1"),
        JoinToken("10.0.0.1:1", HEAD.public, PAIR, "agent", "a b"),
        JoinToken("10.0.0.1:1", "x", PAIR, "agent", "n1"),
        JoinToken("10.0.0.1:1", HEAD.public, KeyPair(HEAD.public, PAIR.secret), "agent", "n1"),
    ],
)
def test_token_with_invalid_fields_is_refused(token):
    with pytest.raises(ConfigError):
        job.parse(token.text())


@given(st.text() | st.text().map(lambda text: job.PREFIX + text))
@example("")
@example(job.PREFIX)
@example(job.PREFIX + base64.urlsafe_b64encode(b"\x97" + b"\xa1x" * 6 + b"\x91" * 100_000).decode())
def test_text_that_is_no_token_is_refused(text):
    with pytest.raises(ConfigError):
        job.parse(text)
