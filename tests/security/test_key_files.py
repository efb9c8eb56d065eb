"""Key pairs and key files: saved files are loaded, malformed ones refused, secrets are never shown."""

from __future__ import annotations

import os
from dataclasses import replace

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rlinf_actors.errors import ConfigError
from rlinf_actors.net.discovery import find_head
from rlinf_actors.security import keyfile
from rlinf_actors.security import keyfile as own
from rlinf_actors.security.keyfile import KeyFile
from rlinf_actors.security.keypair import KeyPair
from rlinf_actors.security.members import is_key
from rlinf_actors.settings import Settings

HEAD = KeyPair.make()
PAIR = KeyPair.make()
AGENT = KeyFile("agent", "gpu-1", PAIR, HEAD.public)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "keys"


@pytest.mark.parametrize("key", [AGENT, KeyFile("head", "head", HEAD), replace(AGENT, role="driver", address="h:1")])
def test_saved_key_file_is_loaded_unchanged(folder, key):
    path = keyfile.path_of(folder, key.role)
    keyfile.save(path, key)
    assert keyfile.load(path) == key
    assert key.server == HEAD.public
    assert folder.stat().st_mode & 0o777 == 0o700
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(folder) == [path.name]


def test_repr_and_errors_hide_the_secret(folder):
    path = folder / "agent.key"
    keyfile.save(path, AGENT)
    assert PAIR.secret not in repr(PAIR) + str(PAIR) + repr(AGENT)
    wrong = path.read_text().replace(PAIR.public, HEAD.public)
    path.write_text(wrong)
    with pytest.raises(ConfigError, match="not that of the public key") as caught:
        keyfile.load(path)
    assert PAIR.secret not in str(caught.value)


@pytest.mark.skipif(os.getuid() != 0, reason="only root reads another user's key")
@pytest.mark.parametrize("kind", ["fifo", "link", "directory"])
def test_root_loads_only_regular_key_files_of_another_user(folder, tmp_path, kind):
    path = folder / "agent.key"
    keyfile.save(path, AGENT)
    user = 61008
    for owned in (folder, path):
        os.chown(owned, user, user)
    assert keyfile.load(path, user=user) == AGENT
    path.rename(folder / "real.key")
    if kind == "fifo":
        os.mkfifo(path, 0o600)
    elif kind == "link":
        path.symlink_to(folder / "real.key")
    else:
        path.mkdir(0o700)
    os.chown(path, user, user, follow_symlinks=False)
    with pytest.raises(ConfigError, match="symbolic links" if kind == "link" else "is not a regular file"):
        keyfile.load(path, user=user)


def test_own_key_file_may_be_a_link(folder):
    keyfile.save(folder / "real.key", AGENT)
    (folder / "agent.key").symlink_to(folder / "real.key")
    assert keyfile.load(folder / "agent.key") == AGENT


@pytest.mark.parametrize(("mode", "where"), [(0o604, "agent.key"), (0o606, "agent.key"), (0o755, ""), (0o701, "")])
def test_key_file_that_others_can_read_is_refused_with_the_fix(folder, mode, where):
    path = folder / "agent.key"
    keyfile.save(path, AGENT)
    open_one = folder / where
    open_one.chmod(mode)
    with pytest.raises(ConfigError, match=f"chmod [67]00 {open_one}$"):
        keyfile.load(path)
    if not where:
        with pytest.raises(ConfigError, match="other users may be able to read"):
            keyfile.save(path, AGENT)


@pytest.mark.parametrize(
    ("mode", "owner", "private"),
    [
        (0o600, 1000, True),
        (0o400, 1000, True),
        (0o700, 1000, True),
        (0o640, 1000, False),
        (0o610, 1000, False),
        (0o604, 1000, False),
        (0o440, 0, True),  # a credential of systemd
        (0o550, 0, True),  # its directory
        (0o660, 0, False),
        (0o444, 0, False),
        (0o600, 1001, False),  # the owner could change the file
    ],
)
def test_is_private_checks_owner_and_mode(mode, owner, private):
    assert keyfile.is_private(mode, owner, 1000) is private


def test_missing_key_file_raises_config_error(folder):
    with pytest.raises(ConfigError, match="No such file"):
        keyfile.load(folder / "agent.key")


GOOD = keyfile.text(AGENT)


@given(st.binary(max_size=5000))
@example(b"")
@example(b"\xff\xfe")
@example(GOOD.encode() * 20)
@example(GOOD.replace("role agent", "role king").encode())
@example(GOOD.replace("head ", "heat ").encode())
@example(GOOD.replace(f"head {HEAD.public}", "head x").encode())
@example(GOOD.replace(PAIR.secret, PAIR.secret[:-1]).encode())
def test_malformed_key_file_raises_config_error(data):
    with pytest.raises(ConfigError) as caught:
        keyfile._parse(data, "agent.key")
    assert caught.value.path == "agent.key"
    assert PAIR.secret not in str(caught.value)


@given(st.binary(min_size=32, max_size=32))
def test_public_key_follows_from_the_secret(secret):
    pair = KeyPair.of_secret(secret)
    assert pair == KeyPair.of_secret(secret) == KeyPair.of_text(pair.public, pair.secret, "")


def test_pairs_differ():
    assert len({KeyPair.make().secret for _ in range(10)}) == 10


def test_key_directory_follows_from_the_settings(tmp_path):
    chosen = Settings.load({"RLINF_ACTORS_KEYS": "/k"})
    assert str(keyfile.directory(chosen)) == "/k"
    assert str(keyfile.directory(Settings.load({"XDG_CONFIG_HOME": "/c"}))) == "/c/rlinf-actors/keys"


def test_identity_is_found_in_the_order_of_its_places(tmp_path):
    home, credentials, named = (tmp_path / name for name in ("home", "credentials", "named"))
    settings = Settings(config_home=str(home), credentials_dir=str(credentials))
    assert keyfile.locate(settings, "agent") is None
    assert own.find(settings, "agent") is None
    usual = keyfile.directory(settings) / "agent.key"
    keyfile.save(usual, AGENT)
    assert keyfile.locate(settings, "agent") == usual
    keyfile.save(credentials / "agent.key", replace(AGENT, name="of-the-unit"))
    assert own.find(settings, "head", "agent").name == "of-the-unit"
    keyfile.save(named / "agent.key", replace(AGENT, name="named"))
    assert own.find(msgspec.structs.replace(settings, key_dir=str(named)), "agent").name == "named"
    assert keyfile.locate(msgspec.structs.replace(settings, key_dir=str(tmp_path)), "agent") is None


def test_blank_credential_counts_as_missing(tmp_path):
    (tmp_path / "credentials").mkdir(mode=0o700)
    (tmp_path / "credentials" / "agent.key").write_text("\n")
    settings = Settings(config_home=str(tmp_path), credentials_dir=str(tmp_path / "credentials"))
    assert keyfile.locate(settings, "agent") is None
    assert own.find(settings, "agent") is None


def test_unreadable_credential_raises_config_error(tmp_path):
    (tmp_path / "agent.key").mkdir()
    with pytest.raises(ConfigError, match=r"agent.key: is not a regular file"):
        keyfile.locate(Settings(credentials_dir=str(tmp_path)), "agent")


@pytest.mark.parametrize("text", ["#" * 40, "0" * 35 + "%nSc1", "x" * 39, "x" * 41, "~" * 40, ""])
def test_text_of_other_than_32_bytes_is_no_key(text):
    assert not is_key(text)


def test_each_half_of_a_pair_is_a_key():
    for _ in range(50):
        pair = KeyPair.make()
        assert is_key(pair.public)
        assert is_key(pair.secret)
    assert is_key("0" * 35 + "%nSc0")


def test_key_says_where_its_head_is(tmp_path):
    """A user who runs no head finds by it the head that lists the key."""
    settings = Settings(heads_dir=str(tmp_path), key_dir=str(tmp_path / "keys"))
    key = KeyFile("driver", "kim", KeyPair.make(), KeyPair.make().public, address="10.0.0.7:6380")
    keyfile.save(tmp_path / "keys" / "driver.key", key)
    assert keyfile.load(tmp_path / "keys" / "driver.key") == key
    endpoint, told = find_head(None, settings)
    assert endpoint == "tcp://10.0.0.7:6380"
    assert f"for which {tmp_path}/keys/driver.key was made" in told
    assert find_head("10.0.0.8:1", settings) == ("tcp://10.0.0.8:1", "")
    with pytest.raises(ConfigError, match="none of yours runs on this machine"):
        find_head(None, msgspec.structs.replace(settings, head="private"))
