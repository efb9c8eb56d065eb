"""The users as which agentd starts workers: what it takes from its own environment, and how it acts as one of them."""

import os
import pwd
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from agentd import users
from agentd.config_fields import Config
from agentd.launch_plan import Rules, find_interpreter
from agentd.users import User, Users, as_user
from rlinf_actors import procfs
from rlinf_actors.errors import ConfigError

LAB = User("lab", 61021, 61030, (61030,), "/home/lab", "/bin/sh", "/run/lab", "/log/lab")


def test_places_of_agentds_user_are_not_handed_on(monkeypatch):
    own = {
        "HOME": "/root", "XDG_RUNTIME_DIR": "/run/user/0", "SUDO_USER": "kim", "SSH_AUTH_SOCK": "/tmp/agent",
        "RLINF_ACTORS_CACHE_DIR": "/root/cache", "RLINF_ACTORS_KEYS": "/root/keys",
        "PATH": "/usr/bin", "NCCL_DEBUG": "INFO",
    }  # fmt: skip
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    given = {**own, "SUDO_USER": "set in agentd.toml"}
    assert LAB.environment(given) == {
        "HOME": "/home/lab", "USER": "lab", "LOGNAME": "lab", "SHELL": "/bin/sh",
        "PATH": "/usr/bin", "NCCL_DEBUG": "INFO", "SUDO_USER": "set in agentd.toml",
    }  # fmt: skip


def test_agentd_of_the_units_as_root_needs_users(monkeypatch, tmp_path):
    """Otherwise the workers of every driver would be root's. rlinf-agentd@USER.service has no capabilities."""
    own = pwd.getpwuid(os.getuid()).pw_name
    monkeypatch.setattr(procfs, "missing_capabilities", lambda needed: [])
    with pytest.raises(ConfigError, match="the workers of every driver would run as root") as error:
        Users(Config(), str(tmp_path), str(tmp_path), in_unit=True)
    assert error.value.path == "workers.users"
    assert not Users(Config(), str(tmp_path), str(tmp_path)).is_used, "started by hand"
    assert Users(Config(users={"*": own}), str(tmp_path), str(tmp_path), in_unit=True).of_driver("d") is None
    monkeypatch.setattr(procfs, "missing_capabilities", lambda needed: ["CAP_SETUID"])
    assert not Users(Config(), str(tmp_path), str(tmp_path), in_unit=True).is_used


def test_accounts_are_looked_up_once(monkeypatch, tmp_path):
    """A directory service may take long to answer, and agentd must not wait for it at each launch."""
    asked, real = [], pwd.getpwnam
    monkeypatch.setattr(users.pwd, "getpwnam", lambda name: asked.append(name) or real(name))
    own = pwd.getpwuid(os.getuid()).pw_name
    found = Users(Config(users={"*": own}), str(tmp_path), str(tmp_path))
    assert [found.of_driver(f"driver-{number}") for number in range(3)] == [None] * 3
    assert asked == [own]


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_agentd_acts_as_a_user_without_its_own_groups():
    """A link in a user's directory must not lead to what only agentd's groups may read."""
    code = """
        import os, sys
        from agentd.users import User, as_user
        os.setgroups([61099])
        for groups in ((61030, 61099), (61030,)):
            with as_user(User("lab", 61021, 61030, groups, "/", "/bin/sh", "/", "/")):
                assert tuple(os.getgroups()) == groups
                try:
                    os.close(os.open(sys.argv[1], os.O_RDONLY))
                    print("read")
                except PermissionError:
                    print("refused")
            assert os.getgroups() == [61099]
    """
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        os.chmod(place, 0o711)
        secret = Path(place, "secret")
        secret.write_text("of a group of agentd")
        os.chown(secret, 0, 61099)
        secret.chmod(0o640)
        command = [sys.executable, "-c", textwrap.dedent(code), str(secret)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["read", "refused"]


@pytest.mark.live
@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_agentd_as_a_user_follows_no_link_into_another_users_process():
    """Its CAP_SYS_PTRACE would let it pass the closed home directory above the other process's working directory."""
    before = procfs.text_of("/proc/self/status").partition("CapInh")[2][:200]
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        os.chmod(place, 0o711)
        project = Path(place, "home", "project")
        project.mkdir(parents=True)
        (project / "file").write_text("of the other user")
        project.parent.chmod(0o700)
        for path in (project.parent, project, project / "file"):
            os.chown(path, 61022, 61030)
        waits = ["setpriv", "--reuid", "61022", "--regid", "61030", "--clear-groups", "sh", "-c", "echo; read x"]
        pipe = subprocess.PIPE
        with subprocess.Popen(waits, cwd=project, stdin=pipe, stdout=pipe) as other:
            assert other.stdout is not None
            other.stdout.readline()
            for link in ("cwd", "root", "fd/0"):
                with as_user(LAB), pytest.raises(PermissionError):
                    os.stat(f"/proc/{other.pid}/{link}")
            assert (Path(f"/proc/{other.pid}/cwd") / "file").read_text() == "of the other user", "agentd itself may"
            other.kill()
    assert procfs.text_of("/proc/self/status").partition("CapInh")[2][:200] == before


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_run_directory_that_users_cannot_reach_is_refused(monkeypatch):
    """Such as the default one of root's own session, /run/user/0."""
    account = pwd.struct_passwd(("lab", "x", 61021, 61030, "", "/", "/bin/sh"))
    monkeypatch.setattr(users.pwd, "getpwnam", lambda name: account)
    monkeypatch.setattr(users.os, "getgrouplist", lambda name, gid: [gid])
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        with pytest.raises(ConfigError, match=f"user lab need to pass through {place}/run-users") as error:
            Users(Config(users={"d": "lab"}), f"{place}/run", f"{place}/log")
        assert error.value.path == "paths.run_dir"
        os.chmod(place, 0o711)
        made = Users(Config(users={"d": "lab"}), f"{place}/run", f"{place}/log")
        user = made.of_driver("d")
        assert user is not None
        assert os.stat(user.run_dir).st_uid == 61021
        made.close()
        assert sorted(os.listdir(place)) == ["log"]


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_tree_of_a_user_is_removed_however_deep_it_is(monkeypatch):
    """And as that user: a link leads to nothing that the user may not remove."""
    account = pwd.struct_passwd(("lab", "x", 61021, 61030, "", "/", "/bin/sh"))
    monkeypatch.setattr(users.pwd, "getpwnam", lambda name: account)
    monkeypatch.setattr(users.os, "getgrouplist", lambda name, gid: [gid])
    monkeypatch.setattr(users, "REMOVE_S", 100.0)  # the usual run directory is of memory, and this one on a disk
    place = tempfile.mkdtemp()
    try:
        os.chmod(place, 0o711)
        kept = Path(place, "kept")
        kept.mkdir(mode=0o777)
        (kept / "file").write_text("of agentd's user")
        made = Users(Config(users={"d": "lab"}), f"{place}/run", f"{place}/log")
        user = made.of_driver("d")
        assert user is not None
        with as_user(user):
            os.symlink(kept, f"{user.run_dir}/w/link")
            at = os.open(f"{user.run_dir}/w", os.O_RDONLY)
            for _ in range(1500):
                for name in ("deep", "beside"):
                    os.mkdir(name, dir_fd=at)
                below = os.open("deep", os.O_RDONLY, dir_fd=at)
                os.close(at)
                at = below
            os.close(os.open("file", os.O_CREAT, dir_fd=at))
            os.close(at)
        made.close()
        assert sorted(os.listdir(place)) == ["kept", "log"]
        assert (kept / "file").exists()
    finally:
        subprocess.run(["rm", "-rf", place], check=True)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_an_interpreters_lookup_shows_nothing_that_is_closed_to_the_user(tmp_path):
    secret = tmp_path / "secret"
    secret.mkdir(mode=0o700)
    (secret / "program").write_text("")
    (secret / "program").chmod(0o755)
    said = set()
    for name in ("program", "nothing"):
        with pytest.raises(ValueError, match="does not exist there") as error:
            find_interpreter(f"{secret}/{name}", {}, Rules("n0", "", user=LAB))
        said.add(str(error.value).replace(name, "NAME"))
    assert len(said) == 1
    assert find_interpreter("/bin/sh", {}, Rules("n0", "", user=LAB)) == "/bin/sh"
