"""The options of `rlinf-actors serve`: what it refuses before it listens, and the files that it prints."""

from __future__ import annotations

import json
import os
import socket
from types import SimpleNamespace

import pytest

from rlinf_actors.cli import app, serve_command
from rlinf_actors.sampling.sample import Board, Sample


@pytest.fixture
def serve(tmp_path, monkeypatch, capsys):
    """Return a function that runs `rlinf-actors serve` with a head at 127.0.0.1:9: code, stdout, stderr."""
    monkeypatch.setenv("RLINF_ACTORS_KEYS", str(tmp_path / "keys"))

    def run(*arguments: str):
        code = app.run(["serve", "--head", "127.0.0.1:9", "--listen", "127.0.0.1:0", *arguments])
        return (code, *capsys.readouterr())

    return run


def test_an_address_of_others_needs_two_options_and_a_token_file(serve, tmp_path):
    token = tmp_path / "token"
    token.write_text("x" * 30)
    token.chmod(0o600)
    for more in ((), ("--beyond-loopback",), ("--token-file", str(token))):
        code, out, errors = serve("--listen", "0.0.0.0:0", *more)
        assert (code, out) == (64, "")
        assert "reverse proxy with TLS" in errors


@pytest.mark.parametrize(("mode", "content", "says"), [(0o644, "x" * 30, "chmod 600"), (0o600, "short", "20 or more")])
def test_a_token_file_is_private_and_long_enough(serve, tmp_path, mode, content, says):
    token = tmp_path / "token"
    token.write_text(content)
    token.chmod(mode)
    code, out, errors = serve("--token-file", str(token))
    assert (code, out) == (78, "")
    assert says in errors


def test_a_cluster_with_keys_needs_a_viewers_key(serve, capsys):
    assert app.run(["keys", "init", "--name", "kim"]) == 0  # of head and driver: neither is used
    capsys.readouterr()
    code, out, errors = serve()
    assert (code, out) == (78, "")
    assert "keys enroll NAME --viewer" in errors.replace("\n", " ")


def test_a_head_that_is_not_reached_at_the_start_is_said_once(capsys):
    drawn = []
    sampler = SimpleNamespace(board=Board(), endpoint="tcp://10.0.0.1:6380")
    sampler.on_sample = lambda: serve_command._say_why(sampler, lambda: drawn.append(sampler.board.number))
    sampler.on_sample()  # events came before the first round had ended
    for fault in ("nobody listens there", "it is silent"):
        sampler.board.take(Sample(1.0, 1.0, fault=fault))
        sampler.on_sample()
    assert drawn == [0, 1, 2]
    errors = capsys.readouterr().err
    assert errors == "the head at tcp://10.0.0.1:6380 is not reached, and is asked again: nobody listens there\n"


def test_a_port_in_use_is_refused_with_its_process_and_another_port(serve):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        code, out, errors = serve("--listen", listen)
    errors = errors.replace("\n", " ")
    assert (code, out) == (78, "")
    assert f"{listen}: Address already in use, by " in errors
    assert f"(pid {os.getpid()} on " in errors
    assert "choose another port, such as --listen 127.0.0.1:0" in errors


def test_dashboard_and_alerts_are_printed_as_they_are(serve):
    code, out, _ = serve("--print", "dashboard")
    assert (code, json.loads(out)["uid"]) == (0, "rlinf-actors")
    code, out, _ = serve("--print", "alerts")
    assert (code, out.count("- alert:")) == (0, 11)
