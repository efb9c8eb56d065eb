"""The key by which processes of one user authenticate each other on loopback."""

from __future__ import annotations

import stat
import subprocess
import sys

import pytest

from rlinf_actors.errors import ConfigError
from rlinf_actors.head.key_registry import OwnKeys
from rlinf_actors.head.store import own_keys
from rlinf_actors.net.socket_security import Mechanism, Proof, Security, key_at
from rlinf_actors.security import keyfile
from rlinf_actors.security import keyfile as thisuser
from rlinf_actors.security.keyfile import KeyFile
from rlinf_actors.security.keypair import KeyPair
from rlinf_actors.settings import Settings

LOOPBACK = "tcp://127.0.0.1:6380"


@pytest.fixture
def settings(tmp_path) -> Settings:
    return Settings(key_dir=str(tmp_path / "keys"))


def test_key_of_this_user_is_made_once_and_is_private(settings, tmp_path):
    made = thisuser.key(settings)
    assert thisuser.key(settings) == made
    assert (made.role, made.server) == ("local", made.pair.public)
    path = tmp_path / "keys" / "local.key"
    assert [path] == list(path.parent.iterdir()), "no other file is left"
    assert (stat.S_IMODE(path.stat().st_mode), stat.S_IMODE(path.parent.stat().st_mode)) == (0o600, 0o700)


def test_concurrent_processes_get_the_same_key(settings):
    script = (
        "import sys; from rlinf_actors.security import keyfile; from rlinf_actors.settings import Settings; "
        "settings = Settings(key_dir=sys.argv[1]); sys.stdin.read(); print(keyfile.key(settings).pair.public)"
    )
    command = [sys.executable, "-c", script, settings.key_dir]
    several = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    for one in several:  # by now each has imported its modules, or soon will
        one.stdin.close()
    said = {one.stdout.read() for one in several}
    for one in several:
        one.stdout.close()
        assert one.wait() == 0
    assert said == {thisuser.key(settings).pair.public + "\n"}


def test_key_that_others_can_read_is_refused(settings, tmp_path):
    thisuser.key(settings)
    (tmp_path / "keys" / "local.key").chmod(0o604)
    with pytest.raises(ConfigError, match=r"must be private to the user (?s:.*)chmod 600"):
        thisuser.key(settings)


def test_error_says_how_to_fix_a_key_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot be written.*Set RLINF_ACTORS_KEYS"):
        thisuser.key(Settings(key_dir=str(tmp_path / "file" / "keys")))


@pytest.mark.parametrize("endpoint", [LOOPBACK, "tcp://[::1]:1", "tcp://127.9.9.9:5"])
def test_loopback_uses_the_users_key_if_no_keys_were_made(settings, endpoint):
    key = key_at(endpoint, settings, "head", insecure=False)
    assert key == thisuser.key(settings)
    security = Security.of(key)
    assert security.mechanism(endpoint, "listen on") is Mechanism.CURVE
    toward = Security.toward(endpoint, settings, "driver")
    assert toward.proof(endpoint) == Proof(key.pair, key.pair.public)
    assert own_keys(key, settings) == OwnKeys(local=key.pair.public)


def test_made_keys_are_preferred_and_other_endpoints_need_no_user_key(settings, tmp_path):
    head = KeyPair.make()
    for endpoint in ("ipc:///run/x", "", "tcp://10.0.0.1:6380", "tcp://0.0.0.0:6380"):
        assert key_at(endpoint, settings, "head", insecure=False) is None
    assert key_at(LOOPBACK, settings, "head", insecure=True) is None
    assert not (tmp_path / "keys").exists()
    keyfile.save(tmp_path / "keys" / "driver.key", KeyFile("driver", "ann", KeyPair.make(), head.public))
    assert key_at(LOOPBACK, settings, "driver", insecure=False).server == head.public


def test_keys_of_another_cluster_are_not_used_on_loopback(tmp_path):
    there = KeyPair.make()
    home = Settings(config_home=str(tmp_path))
    folder = keyfile.directory(home)
    for role in ("agent", "driver"):
        keyfile.save(folder / f"{role}.key", KeyFile(role, role, KeyPair.make(), there.public))
    for role in ("head", "agent", "driver"):
        assert key_at(LOOPBACK, home, role, insecure=False).role == "local"
    assert key_at("tcp://10.0.0.1:6380", home, "driver", insecure=False).role == "driver"
    named = Settings(key_dir=str(folder))
    of_unit = Settings(credentials_dir=str(folder), config_home=str(tmp_path / "none"))
    by_file = Settings(config_home=str(tmp_path), key_file=str(folder / "driver.key"))
    for settings in (named, of_unit, by_file):
        assert key_at(LOOPBACK, settings, "driver", insecure=False).server == there.public
    keyfile.save(folder / "head.key", KeyFile("head", "head", there))
    assert key_at(LOOPBACK, home, "driver", insecure=False).server == there.public
