"""Finding the head: by option, environment, client file, and the heads that run on this machine."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import pace
import pytest

from rlinf_actors.cluster.connect import ClusterArguments
from rlinf_actors.cluster.local_daemon import AGENTD, RLINF_ACTORS, boot
from rlinf_actors.errors import ConfigError
from rlinf_actors.net import head_records
from rlinf_actors.net.discovery import endpoint_at, find_head, is_here, local_way, with_client_file
from rlinf_actors.net.head_records import PREFIX, SOCKET, SUFFIX, HeadRecord, find_records, publish
from rlinf_actors.settings import CLIENT_CONFIG, HEAD, Settings


@pytest.fixture
def settings(tmp_path):
    """Settings of a machine without a running head."""
    for name in ("heads", "r"):
        (tmp_path / name).mkdir()
    return Settings(
        heads_dir=str(tmp_path / "heads"), run_dir=str(tmp_path / "r"), config_home=str(tmp_path / "config")
    )


@pytest.fixture
def run(settings):
    """Publish records, as running heads do."""
    ends = []

    def start(kind: str, *endpoints: str, script: str = "", age_s: float = 0.0, pid: int = 4321) -> HeadRecord:
        record = HeadRecord(kind, pid, time.time() - age_s, list(endpoints), script)
        ends.append(publish(record, settings))
        return record

    yield start
    for end in ends:
        end()


def test_the_option_wins_over_the_environment():
    settings = Settings(head="10.0.0.1:1")
    assert find_head("127.0.0.1:6380", settings) == ("tcp://127.0.0.1:6380", "")
    assert find_head(None, settings) == ("tcp://10.0.0.1:1", "")
    assert find_head("ipc:///run/x", settings) == ("ipc:///run/x", "")


@pytest.mark.parametrize(("option", "environment", "path"), [("host", None, "--head"), (None, "host:", HEAD)])
def test_malformed_address_raises_config_error(option, environment, path):
    with pytest.raises(ConfigError, match=r"neither HOST:PORT .* nor a run directory") as caught:
        find_head(option, Settings(head=environment))
    assert caught.value.path == path


def test_unresolvable_host_name_is_named():
    with pytest.raises(
        ConfigError, match=r"name 'nosuch\.invalid' cannot be resolved \(.*\): is it spelt right"
    ) as caught:
        find_head(None, Settings(head="nosuch.invalid:6380"))
    assert caught.value.path == HEAD


# --- what runs here ---


def test_without_a_running_head_the_error_says_how_to_name_one(settings):
    with pytest.raises(ConfigError, match=r"none of yours runs on this machine: pass --head HOST:PORT, set RLINF_HEAD"):
        find_head(None, settings)


def test_the_only_private_cluster_is_found(settings, run):
    run("private", "ipc:///tmp/rlinf-a/head", script="train.py", age_s=65)
    endpoint, told = find_head(None, settings)
    assert endpoint == "ipc:///tmp/rlinf-a/head"
    assert told == "private cluster, pid 4321, up 65 s: train.py (/tmp/rlinf-a)"


def test_standing_head_is_preferred_to_private_clusters(settings, run):
    run("private", "ipc:///tmp/rlinf-a/head")
    run("private", "ipc:///tmp/rlinf-b/head")
    run("head", "tcp://10.0.0.1:6380")
    endpoint, told = find_head(None, settings)
    assert endpoint == "tcp://10.0.0.1:6380"
    beside = "2 private clusters also run: --head /tmp/rlinf-a, --head /tmp/rlinf-b"
    assert told.splitlines() == ["head, pid 4321, up 0 s: its program is not known (10.0.0.1:6380)", beside]


def test_the_address_of_an_own_head_leads_to_its_unix_socket(settings, run):
    run("head", "ipc:///tmp/rlinf-a/head", "tcp://0.0.0.0:6380")
    run("head", "tcp://127.0.0.1:6381")
    assert local_way("tcp://127.0.0.1:6380", settings) == "ipc:///tmp/rlinf-a/head"
    for other in ("tcp://127.0.0.1:6381", "tcp://10.0.0.1:6380", "ipc:///run/x"):
        assert local_way(other, settings) == other


@pytest.mark.parametrize("kind", ["private", "head"])
def test_two_heads_are_ambiguous_and_both_are_listed(settings, run, kind):
    run(kind, "ipc:///tmp/rlinf-a/head", script="train.py --epochs 3", age_s=7300, pid=11)
    run(kind, "ipc:///tmp/rlinf-b/head", "tcp://0.0.0.0:6380", script="rlinf-actors head", pid=22)
    with pytest.raises(ConfigError) as caught:
        find_head(None, settings)
    first, *lines = str(caught.value).splitlines()
    what = "private cluster" if kind == "private" else "head"
    assert first == "2 heads of yours run on this machine; say which by --head, or by RLINF_HEAD:"
    assert lines == [
        f"  --head /tmp/rlinf-a    {what}, pid 11, up 2 h: train.py --epochs 3",
        f"  --head 127.0.0.1:6380  {what}, pid 22, up 0 s: rlinf-actors head",
    ]


def test_head_of_a_local_agentd_is_suggested_and_not_used(settings, run):
    run("node", "tcp://10.0.0.1:6380", pid=33)
    with pytest.raises(ConfigError, match=r"agentd \(pid 33\) of this machine has joined the head at 10.0.0.1:6380"):
        find_head(None, settings)


def test_record_is_removed_by_its_head_or_by_the_next_one(settings):
    remove = publish(HeadRecord("head", os.getpid(), time.time(), ["tcp://127.0.0.1:1"]), settings)
    (path,) = (record.path for record in find_records(settings).records)
    kept = Path(path).read_bytes()
    remove()
    assert find_records(settings) == head_records.MachineRecords(())
    Path(path).write_bytes(kept)  # as kill -9 leaves it
    os.chmod(path, 0o600)
    assert find_records(settings) == head_records.MachineRecords(())
    publish(HeadRecord("head", os.getpid(), time.time(), ["tcp://127.0.0.1:2"]), settings)()
    assert os.listdir(settings.heads_dir) == [], "the next head removes the dead head's record"


def test_record_of_a_unit_that_is_restarted_counts_and_another_killed_heads_does_not(monkeypatch, tmp_path):
    monkeypatch.setattr(head_records, "UNIT_DIR", f"{tmp_path}/run/")
    monkeypatch.setattr(head_records, "OF_UNITS", (f"{tmp_path}/run/*",))
    monkeypatch.setattr(head_records, "PLACES", (str(tmp_path / "tmp"),))
    for place, port in (("run/rlinf-head", 1), ("tmp", 2)):
        (tmp_path / place).mkdir(parents=True)
        path = tmp_path / place / f"{PREFIX}killed{SUFFIX}"
        path.write_bytes(msgspec.json.encode(HeadRecord("head", 1, 0.0, [f"tcp://127.0.0.1:{port}"])))
        path.chmod(0o600)
    found = [record.endpoints for record in find_records(Settings()).records if record.path]
    assert found == [["tcp://127.0.0.1:1"]]


def test_record_of_a_unit_replaces_a_killed_heads_record_in_the_units_directory(monkeypatch, tmp_path):
    monkeypatch.setattr(head_records, "UNIT_DIR", f"{tmp_path}/")
    monkeypatch.setattr(head_records, "PLACES", ("/no-such-disk",))
    unit_dir = tmp_path / "rlinf-head"
    unit_dir.mkdir()
    (unit_dir / f"{PREFIX}killed{SUFFIX}").write_bytes(b"{}")
    remove = publish(HeadRecord("head", 1, 0.0, ["tcp://127.0.0.1:1"]), Settings(), str(unit_dir))
    (name,) = os.listdir(unit_dir)
    assert "killed" not in name
    remove()


def test_record_is_written_to_the_next_place_if_the_first_fails(settings, monkeypatch, tmp_path):
    monkeypatch.setattr(head_records, "PLACES", (f"{tmp_path}/no-such-disk", settings.heads_dir))
    usual = Settings(run_dir=settings.run_dir)
    remove = publish(HeadRecord("head", 1, 0.0, ["tcp://127.0.0.1:1"]), usual)
    assert len(os.listdir(settings.heads_dir)) == 1
    remove()


def test_head_that_cannot_write_its_record_logs_a_warning(settings, monkeypatch, caplog):
    monkeypatch.setattr(head_records, "PLACES", ("/no-such-disk",))
    publish(HeadRecord("head", 1, 0.0, ["tcp://127.0.0.1:1"]), Settings())()
    assert "`rlinf-actors estop` finds it by --head only" in caplog.text


@pytest.mark.parametrize(
    ("content", "mode", "why"),
    [
        (b"{", 0o600, "truncated"),
        (msgspec.json.encode(HeadRecord("other", 1, 0.0, ["tcp://x:1"])), 0o600, "a record of kind 'other'"),
        (msgspec.json.encode(HeadRecord("head", 1, 0.0, [])), 0o600, "with 0 endpoints"),
        (msgspec.json.encode(HeadRecord("head", 1, 0.0, ["tcp://x:1"])), 0o644, "others could have written it"),
    ],
)
def test_unreadable_record_is_reported_with_the_reason(settings, content, mode, why):
    path = f"{settings.heads_dir}/{PREFIX}x{SUFFIX}"
    with open(path, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        os.write(file.fileno(), content)
        os.chmod(path, mode)
        ((at, said),) = find_records(settings).unreadable
    assert at == path
    assert why in said


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_root_finds_heads_of_other_users_if_it_asks_for_everybody(settings, run):
    run("head", "tcp://127.0.0.1:1")
    (path,) = (record.path for record in find_records(settings).records)
    os.chown(path, 12345, -1)
    assert [record.user for record in find_records(settings, everybody=True).records] == [12345]
    assert find_records(settings) == head_records.MachineRecords((), (), (12345,))


# --- what other users publish ---

OTHER, THIRD = 61008, 61009
root_only = pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
ASK = """
import sys
from rlinf_actors.net.head_records import clear_stale, find_records
from rlinf_actors.settings import Settings
settings = Settings(heads_dir=sys.argv[1], run_dir=sys.argv[1])
clear_stale(settings)
print(find_records(settings, everybody=True))
"""


@pytest.fixture
def shared():
    """A directory like /tmp, with records of several users."""
    with tempfile.TemporaryDirectory(prefix="heads-") as folder:
        os.chmod(folder, 0o1777)
        yield folder


@pytest.fixture
def leaves(shared):
    """Make locked files of other users."""
    with contextlib.ExitStack() as ends:

        def make(name: str, data: bytes, user: int = OTHER) -> str:
            path = f"{shared}/{PREFIX}{name}{SUFFIX}"
            fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            ends.callback(os.close, fd)
            os.write(fd, data)
            os.fchown(fd, user, user)
            fcntl.flock(fd, fcntl.LOCK_EX)
            return path

        yield make


def records_seen_by_this_user(shared: str) -> str:
    """The records that a process of this user finds, after its removal of dead ones."""
    asks = subprocess.run(
        [sys.executable, "-c", ASK, shared], capture_output=True, text=True, check=True, timeout=pace.PATIENCE_S
    )
    return asks.stdout


@root_only
@pytest.mark.parametrize("kind", ["fifo", "directory", "link", "socket"])
def test_record_that_is_not_a_regular_file_is_skipped_without_waiting(shared, kind):
    path = f"{shared}/{PREFIX}x{SUFFIX}"
    if kind == "fifo":
        os.mkfifo(path, 0o644)
    elif kind == "directory":
        os.mkdir(path)
    elif kind == "link":
        os.symlink("/dev/zero", path)
    else:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path)
    os.chown(path, OTHER, OTHER, follow_symlinks=False)
    assert records_seen_by_this_user(shared).strip() == repr(head_records.MachineRecords(()))
    assert os.path.lexists(path)


@root_only
@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xfe" * 1000,
        b'{"kind":"head","x":' + b"[" * 60000,
        b"x" * 1_000_000,
        msgspec.json.encode(HeadRecord("head", 1, 0.0, [f"tcp://127.0.0.1:{port}" for port in range(1, 1000)])),
    ],
    ids=["no text", "deep", "huge", "many endpoints"],
)
def test_malformed_record_of_another_user_is_reported(shared, leaves, data):
    path = leaves("x", data)
    seen = find_records(Settings(heads_dir=shared), everybody=True)
    assert [at for at, _ in seen.unreadable] == [path]
    assert find_records(Settings(heads_dir=shared)) == head_records.MachineRecords((), (), (OTHER,))


@root_only
def test_own_records_come_first_and_other_users_take_turns(shared, leaves):
    for n in range(3):
        leaves(str(n), msgspec.json.encode(HeadRecord("head", 1, 0.0, [f"tcp://127.0.0.1:{n + 1}"])))
    leaves("third", msgspec.json.encode(HeadRecord("head", 1, 5.0, ["tcp://127.0.0.1:9"])), THIRD)
    settings = Settings(heads_dir=shared)
    remove = publish(HeadRecord("head", os.getpid(), time.time(), ["tcp://127.0.0.1:8"]), settings)
    users = [record.user for record in find_records(settings, everybody=True).records]
    assert users == [os.getuid(), OTHER, THIRD, OTHER, OTHER]
    assert find_head(None, settings)[0] == "tcp://127.0.0.1:8", "other commands ignore other users' records"
    remove()
    with pytest.raises(ConfigError, match="none of yours runs on this machine"):
        find_head(None, settings)


@root_only
def test_records_beyond_the_limit_are_reported(shared, leaves, monkeypatch):
    monkeypatch.setattr(head_records, "MAX_OF_OTHERS", 1)
    for n in range(3):
        leaves(str(n), msgspec.json.encode(HeadRecord("head", 1, 0.0, [f"tcp://127.0.0.1:{n + 1}"])))
    seen = find_records(Settings(heads_dir=shared), everybody=True)
    assert len(seen.records) == 1
    assert [why for _, why in seen.unreadable] == [f"user {OTHER} has left more than 1"]


@root_only
def test_a_directory_of_another_user_is_no_run_directory(shared):
    os.chown(shared, THIRD, THIRD)
    os.seteuid(OTHER)
    try:
        with pytest.raises(ConfigError, match=rf"is a cluster of user {THIRD}, not of yours \({OTHER}\)"):
            endpoint_at(shared, "--head")
    finally:
        os.seteuid(0)


def test_another_users_record_does_not_hide_an_older_heads_socket(settings, listening, monkeypatch):
    directory = listening("a")
    theirs = HeadRecord("head", 1, 0.0, ["ipc:///x", f"ipc://{directory}/{SOCKET}"])
    Path(f"{settings.heads_dir}/{PREFIX}x{SUFFIX}").write_bytes(b"")
    real = os.lstat
    monkeypatch.setattr(head_records.os, "lstat", lambda path: _as_other(real(path), str(path)))
    monkeypatch.setattr(head_records.os, "geteuid", lambda: 0)
    monkeypatch.setattr(head_records, "_read", lambda path, owner: msgspec.structs.replace(theirs, user=owner))
    seen = find_records(settings, everybody=True)
    assert [record.endpoints for record in seen.records] == [[f"ipc://{directory}/{SOCKET}"], theirs.endpoints]


def _as_other(info: os.stat_result, path: str) -> os.stat_result:
    fields = list(info)
    fields[4] = OTHER if path.endswith(SUFFIX) else 0
    return os.stat_result(fields)


def test_head_with_a_full_accept_queue_is_found_without_waiting(settings, listening):
    path = f"{listening('a')}/{SOCKET}"
    with contextlib.ExitStack() as ends:
        full = False
        while not full:
            one = ends.enter_context(socket.socket(socket.AF_UNIX))
            one.setblocking(False)
            full = one.connect_ex(path) != 0
        assert [record.endpoints for record in find_records(settings).records] == [[f"ipc://{path}"]]


def test_comparing_a_remote_head_does_not_resolve_its_name(monkeypatch):
    monkeypatch.setattr(socket.socket, "bind", lambda *_: pytest.fail("name resolution may block"))
    assert not is_here("tcp://gpu-head:6380", "tcp://0.0.0.0:6380")


@pytest.mark.parametrize(
    ("words", "script"),
    [
        (["python3.11", "-u", "-X", "dev", "/home/ann/train.py", "--epochs", "3"], "train.py --epochs 3"),
        (["/usr/bin/python", "-m", "agentd", "--head"], "agentd --head"),
        (["python", "-c", "pass"], "python -c pass"),
        (["python", *boot(AGENTD), "--of-run"], "agentd --of-run"),
        (["python", *boot(RLINF_ACTORS), "head"], "rlinf-actors head"),
        (["python"], "python"),
        (["/opt/bin/rlinf-actors", "head"], "rlinf-actors head"),
        (
            ["agentd", "--connect", "gpu-head:6380", "--token", "rlinf-join-abc", "--strict"],
            "agentd --connect gpu-head:6380 --token ... --strict",
        ),
        (["agentd", "--token=rlinf-join-abc"], "agentd --token=..."),
        (["agentd", "--token", "-"], "agentd --token -"),
        (["rlinf-actors", "keys", "join", "rlinf-join-abc"], "rlinf-actors keys join ..."),
    ],
)
def test_a_script_is_named_without_its_interpreter(words, script):
    assert head_records.script_in(words) == script


# --- heads without a record ---


@pytest.fixture
def listening(settings):
    """Make run directories like those of earlier versions, with a listening socket."""
    sockets = []

    def make(name: str, mode: int = 0o700) -> str:
        directory = f"{settings.run_dir}/rlinf-{name}"
        os.mkdir(directory)
        os.chmod(directory, mode)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"{directory}/{SOCKET}")
        listener.listen()
        sockets.append(listener)
        return directory

    yield make
    for listener in sockets:
        listener.close()


def test_run_directory_names_its_head(listening):
    directory = listening("a")
    assert find_head(directory, Settings())[0] == f"ipc://{directory}/{SOCKET}"


def test_a_head_without_a_record_is_found_and_named_by_its_socket(settings, listening, run):
    directory = listening("a")
    assert find_head(None, settings)[0] == f"ipc://{directory}/{SOCKET}"
    (found,) = find_records(settings).records
    assert found.told().startswith(f"head without a record, pid {os.getpid()}: ")
    assert found.script == head_records.script_of(os.getpid())
    run("private", f"ipc://{directory}/{SOCKET}")
    assert len(find_records(settings).records) == 1, "a head with a record is listed once"


def test_dead_public_and_foreign_run_directories_are_ignored(settings, listening):
    os.mkdir(f"{settings.run_dir}/rlinf-dead", 0o700)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(f"{settings.run_dir}/rlinf-dead/{SOCKET}")
    listening("open", mode=0o755)
    if os.getuid() == 0:
        os.chown(listening("theirs"), 12345, -1)
    assert find_records(settings).records == ()


# --- the client file ---


def write(tmp_path, text: str, mode: int = 0o600) -> Settings:
    folder = tmp_path / "config" / "rlinf-actors"
    folder.mkdir(parents=True)
    (folder / "client.toml").write_text(text)
    (folder / "client.toml").chmod(mode)
    return Settings(config_home=str(tmp_path / "config"), heads_dir=str(tmp_path))


def test_client_file_names_the_head_if_the_environment_does_not(tmp_path):
    settings = write(tmp_path, 'head = "127.0.0.1:7"\nkey_file = "/etc/x.key"\n')
    found = with_client_file(settings)
    assert (found.head, found.key_file) == ("127.0.0.1:7", "/etc/x.key")
    assert find_head(None, found)[0] == "tcp://127.0.0.1:7"
    assert ClusterArguments().endpoint(found, 3) == "tcp://127.0.0.1:7"
    named = Settings(config_home=settings.config_home, head="127.0.0.1:8", key_dir="/keys")
    assert with_client_file(named) == named


def test_error_in_the_client_files_head_names_the_file(tmp_path):
    found = with_client_file(write(tmp_path, 'head = "gpu:"\n'))
    for attempt in (lambda: find_head(None, found), lambda: ClusterArguments().endpoint(found, 1)):
        with pytest.raises(ConfigError) as caught:
            attempt()
        assert caught.value.path == f"{tmp_path}/config/rlinf-actors/client.toml: head"


@pytest.mark.parametrize(
    ("text", "mode", "error"),
    [
        (
            'haed = "a:1"\n',
            0o600,
            "client.toml: haed: unknown key 'haed'; did you mean 'head'? Valid keys: head, key_file",
        ),
        ("head = 3\n", 0o600, "client.toml: head: is 3; it must be a text"),
        ("head\n", 0o600, "client.toml: is not TOML"),
        ('head = "a:1"\n', 0o620, "others can write to it (mode 0620"),
    ],
)
def test_a_wrong_client_file_is_an_error_that_says_what_to_do(tmp_path, text, mode, error):
    with pytest.raises(ConfigError) as caught:
        with_client_file(write(tmp_path, text, mode))
    assert error in str(caught.value)


def test_a_named_client_file_must_be_there(tmp_path):
    with pytest.raises(ConfigError, match=f"{CLIENT_CONFIG} .*: does not exist"):
        with_client_file(Settings(client_config=f"{tmp_path}/none"))


# --- Cluster() ---


def test_cluster_joins_only_a_head_that_was_named(settings, run):
    run("head", "tcp://10.0.0.1:6380")
    assert ClusterArguments().endpoint(settings, 1) == "", "a private one"
    with pytest.raises(
        ConfigError, match=r"is 2, and no head is known\. .*run --nodes 2 -- .* head = .* into .*client\.toml"
    ):
        ClusterArguments().endpoint(settings, 2)


def test_cluster_names_the_variable_of_an_unresolvable_head():
    with pytest.raises(ConfigError, match=r"^RLINF_HEAD: the head's name 'nosuch\.invalid' cannot be resolved"):
        ClusterArguments().endpoint(Settings(head="nosuch.invalid:6380"), 1)


def test_head_private_selects_a_private_cluster(settings):
    named = Settings(head="10.0.0.1:6380")
    assert ClusterArguments(head="private").endpoint(named, 1) == ""
    assert ClusterArguments().endpoint(Settings(head="private"), 1) == ""
    with pytest.raises(ConfigError, match="none of yours runs on this machine"):
        find_head(None, Settings(head="private", heads_dir=settings.heads_dir))


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_root_finds_the_head_of_the_unit_but_no_head_of_another_user(tmp_path, monkeypatch):
    """As `rlinf-actors keys list` on the head's machine, with a head under systemd as user rlinf-head."""
    unit, common = tmp_path / "run-head", tmp_path / "tmp"
    settings = Settings(config_home=str(tmp_path / "config"))
    monkeypatch.setattr(head_records, "PLACES", (str(common),))
    monkeypatch.setattr(head_records, "OF_UNITS", (str(unit),))
    monkeypatch.setattr(head_records, "parents", lambda settings: [])
    monkeypatch.setattr("rlinf_actors.net.discovery.OF_HEAD_UNIT", str(unit))
    locks = []
    for place, port in ((common, 1), (unit, 2)):
        place.mkdir()
        record = HeadRecord("head", os.getpid(), time.time(), [f"tcp://127.0.0.1:{port}"])
        path, lock = head_records._write(record, str(place))
        os.chown(path, 61011, 61011)
        locks.append((path, lock))
        if place is common:
            with pytest.raises(ConfigError, match=r"of another user runs here \(user 61011\)"):
                find_head(None, settings)
    assert find_head(None, settings)[0] == "tcp://127.0.0.1:2"
    for path, lock in locks:
        head_records._remove(path, lock)
