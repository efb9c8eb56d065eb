from __future__ import annotations

import os
import socket

import pytest

from rlinf_actors.cli.session import SOCKET, find_head, local_heads
from rlinf_actors.errors import ConfigError
from rlinf_actors.settings import Settings


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    """A directory for private clusters, and nothing in the usual places."""
    monkeypatch.setattr("rlinf_actors.cli.session.parents", lambda settings: [settings.run_dir])
    directory = tmp_path / "r"
    directory.mkdir()
    return directory


@pytest.fixture
def private_cluster(run_dir):
    """Makes directories as private clusters have them; someone listens there."""
    sockets = []

    def make(name: str, mode: int = 0o700) -> str:
        directory = run_dir / f"rlinf-{name}"
        directory.mkdir(mode=mode)
        directory.chmod(mode)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(directory / SOCKET))
        listener.listen()
        sockets.append(listener)
        return str(directory)

    yield make
    for listener in sockets:
        listener.close()


def test_the_option_wins_over_the_environment():
    settings = Settings(head="10.0.0.1:1")
    assert find_head("127.0.0.1:6380", settings) == "tcp://127.0.0.1:6380"
    assert find_head(None, settings) == "tcp://10.0.0.1:1"
    assert find_head("ipc:///run/x", settings) == "ipc:///run/x"


@pytest.mark.parametrize(("option", "environment", "path"), [("host", None, "--head"), (None, "host:", "RLINF_HEAD")])
def test_what_is_no_address(option, environment, path):
    with pytest.raises(ConfigError, match=r"neither HOST:PORT .* nor a run directory") as caught:
        find_head(option, Settings(head=environment))
    assert caught.value.path == path


def test_a_directory(private_cluster):
    directory = private_cluster("a")
    assert find_head(directory, Settings()) == f"ipc://{directory}/{SOCKET}"


def test_the_only_private_cluster_is_meant(run_dir, private_cluster, capsys):
    directory = private_cluster("a")
    assert find_head(None, Settings(run_dir=str(run_dir))) == f"ipc://{directory}/{SOCKET}"
    out, err = capsys.readouterr()
    assert out == ""
    assert directory in err


def test_of_two_private_clusters_none_is_meant(run_dir, private_cluster):
    private_cluster("a")
    private_cluster("b")
    with pytest.raises(ConfigError, match=r"2 clusters .* say which by --head DIR: .*rlinf-a.*rlinf-b"):
        find_head(None, Settings(run_dir=str(run_dir)))


def test_nothing_to_look_at(run_dir):
    with pytest.raises(ConfigError, match="pass --head HOST:PORT or set RLINF_HEAD"):
        find_head(None, Settings(run_dir=str(run_dir)))


def test_a_socket_that_a_killed_cluster_left_is_not_a_cluster(run_dir):
    directory = run_dir / "rlinf-dead"
    directory.mkdir(mode=0o700)
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(directory / SOCKET))
    dead.close()
    assert local_heads(Settings(run_dir=str(run_dir))) == []


def test_a_directory_that_others_can_read_is_not_ours(run_dir, private_cluster):
    private_cluster("open", mode=0o755)
    assert local_heads(Settings(run_dir=str(run_dir))) == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_a_cluster_of_another_user_is_left_alone(run_dir, private_cluster):
    os.chown(private_cluster("theirs"), 12345, -1)
    assert local_heads(Settings(run_dir=str(run_dir))) == []
