"""agentd's configuration: files, precedence, and every refusal with its path."""

from __future__ import annotations

import json
import os

import msgspec
import pytest

from agentd import node_report
from agentd.config import (
    Changes,
    check_files,
    for_reaping,
    inherited_environment,
    launch_rules,
    load,
    reload,
)
from agentd.config_fields import KEYS, RELOADABLE, Config, key_of
from agentd.run_dir import RunDir, default_run_dir, make_directories
from rlinf_actors.errors import ConfigError
from rlinf_actors.net.host import DEFAULT_LISTEN, endpoint_of, split_address
from rlinf_actors.wire.launch_rules import LaunchRules

WHOLE = """
[head]
connect = "127.0.0.1:7000"
[node]
name = "lab"
id = "node-7"
rank = 2
ip = "127.0.0.1"
labels = {room = "b1"}
env = {ROBOT_IP = "10.0.0.9"}
[paths]
run_dir = "/run/x"
log_dir = "/var/x"
[workers]
interpreters = ["/opt", "/srv"]
prestart = ["torch"]
stop_grace_s = 5
[hardware]
probe_timeout_s = 2.5
described = "/etc/hw.json"
[timers]
beat_s = 0.5
lease_s = 4
head_grace_s = 60
"""


def written(tmp_path, text, name="agentd.toml"):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return str(path)


def test_every_key_of_the_file_is_read(tmp_path):
    path = written(tmp_path, WHOLE)
    assert load({"config": path}, {}) == Config(
        connect="127.0.0.1:7000",
        name="lab",
        node_id="node-7",
        rank=2,
        ip="127.0.0.1",
        labels={"room": "b1"},
        env={"ROBOT_IP": "10.0.0.9"},
        run_dir="/run/x",
        log_dir="/var/x",
        interpreters=("/opt", "/srv"),
        prestart=("torch",),
        stop_grace_s=5,
        probe_timeout_s=2.5,
        described="/etc/hw.json",
        beat_s=0.5,
        lease_s=4,
        head_grace_s=60,
        files=(path,),
    )


def test_command_line_overrides_environment_and_environment_overrides_file(tmp_path):
    path = written(tmp_path, WHOLE)
    environ = {
        "RLINF_ACTORS_CONFIG": path,
        "RLINF_NODE_RANK": "5",
        "RLINF_HEAD": "127.0.0.1:1",
        "RLINF_ACTORS_RUN_DIR": "/e",
    }
    loaded = load({"run_dir": "/c"}, environ)
    assert (loaded.rank, loaded.connect, loaded.run_dir, loaded.log_dir) == (5, "127.0.0.1:1", "/c", "/var/x")
    assert load({"connect": "127.0.0.1:2", "rank": 0}, environ).connect == "127.0.0.1:2"


def test_drop_ins_override_the_file_in_the_order_of_their_names(tmp_path):
    path = written(tmp_path, WHOLE)
    written(tmp_path, '[node]\nname = "b"\nenv = {X = "1"}\n', "agentd.d/20.toml")
    written(tmp_path, '[node]\nname = "a"\n', "agentd.d/10.toml")
    loaded = load({"config": path}, {})
    assert loaded.name == "b"
    assert loaded.env == {"ROBOT_IP": "10.0.0.9", "X": "1"}
    assert [os.path.basename(file) for file in loaded.files] == ["agentd.toml", "10.toml", "20.toml"]


def test_later_file_changes_the_role_and_one_file_cannot_have_both(tmp_path):
    path = written(tmp_path, '[head]\nlisten = "127.0.0.1:5"\n')
    written(tmp_path, '[head]\nconnect = "127.0.0.1:7000"\n', "agentd.d/10.toml")
    loaded = load({"config": path}, {})
    assert (loaded.head, loaded.listen, loaded.connect) == (False, None, "127.0.0.1:7000")
    written(tmp_path, '[head]\nlisten = "127.0.0.1:6"\n', "agentd.d/20.toml")
    loaded = load({"config": path}, {})
    assert (loaded.head, loaded.listen, loaded.connect) == (True, "127.0.0.1:6", None)
    written(tmp_path, '[head]\nlisten = "127.0.0.1:6"\nconnect = "127.0.0.1:7"\n', "agentd.d/30.toml")
    with pytest.raises(ConfigError, match=r"30\.toml: head: has listen and connect"):
        load({"config": path}, {})


def test_drop_ins_are_read_without_a_main_file(tmp_path, monkeypatch):
    monkeypatch.setattr("agentd.config.DEFAULT_FILE", tmp_path / "agentd.toml")
    path = written(tmp_path, '[node]\nname = "a"\n', "agentd.d/10.toml")
    assert (load({}, {}).name, load({}, {}).files) == ("a", (path,))


@pytest.mark.parametrize(
    ("arguments", "environ", "text", "expected"),
    [
        ({"head": True}, {}, "", (True, DEFAULT_LISTEN, None)),
        ({"head": True, "listen": "127.0.0.1:0"}, {}, "", (True, "127.0.0.1:0", None)),
        ({"listen": "127.0.0.1:0"}, {}, "", (True, "127.0.0.1:0", None)),
        ({"head": True, "embedded": True, "owner_pid": 1}, {}, "", (True, None, None)),
        ({"connect": "h:1"}, {}, '[head]\nlisten = "127.0.0.1:5"', (False, None, "h:1")),
        ({"head": True}, {"RLINF_HEAD": "h:1"}, '[head]\nconnect = "h:2"', (True, DEFAULT_LISTEN, None)),
        ({}, {"RLINF_HEAD": "h:1"}, '[head]\nlisten = "127.0.0.1:5"', (False, None, "h:1")),
        ({}, {}, '[head]\nlisten = "127.0.0.1:5"', (True, "127.0.0.1:5", None)),
        ({}, {}, "", (False, None, None)),
    ],
)
def test_role_follows_from_options_environment_and_file(tmp_path, arguments, environ, text, expected):
    loaded = load({**arguments, "config": written(tmp_path, text)}, environ)
    assert (loaded.head, loaded.listen, loaded.connect) == expected


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ("[nodes]", "nodes", "unknown key 'nodes'; did you mean 'node'? Valid keys: head, node, security, paths"),
        ('[node]\nnme = "x"', "node.nme", "unknown key 'nme'; did you mean 'name'? Valid keys: name, id, rank"),
        ("node = 3", "node", "is 3; it must be a table: [node]"),
        ("[node]\nname = 3", "node.name", "is 3; it must be a text"),
        ("[node]\nrank = true", "node.rank", "is True; it must be a whole number"),
        ("[node]\nenv = {A = 1}", "node.env.A", "is 1; it must be a text (quote it)"),
        ("[workers]\ninterpreters = [1]", "workers.interpreters[0]", "is 1; it must be a text (quote it)"),
        ("[workers]\nprestart = 1", "workers.prestart", "is 1; it must be a list of texts"),
        ('[timers]\nbeat_s = "1"', "timers.beat_s", "is '1'; it must be a number"),
        ("[node", "agentd.toml", "is not TOML"),
    ],
)
def test_error_names_the_place_in_a_wrong_file(tmp_path, text, where, what):
    with pytest.raises(ConfigError) as error:
        load({"config": written(tmp_path, text)}, {})
    assert error.value.path.endswith(where)
    assert error.value.path.startswith(str(tmp_path))
    assert what in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        ({"listen": "7000"}, "--listen"),
        ({"listen": "h:x"}, "--listen"),
        ({"connect": ":1"}, "--connect"),
        ({"connect": "h:70000"}, "--connect"),
        ({"rank": -1}, "node.rank"),
        ({"beat_s": 0}, "timers.beat_s"),
        ({"lease_s": 2.0}, "timers.lease_s"),
        ({"unresponsive_s": 3.0}, "timers.unresponsive_s"),
        ({"probe_s": 0.0}, "timers.probe_s"),
        ({"stop_grace_s": -1}, "workers.stop_grace_s"),
    ],
)
def test_invalid_values_raise_config_error(tmp_path, arguments, path):
    with pytest.raises(ConfigError) as error:
        load({**arguments, "config": written(tmp_path, "")}, {})
    assert error.value.path == path


def test_units_directories_have_the_lowest_precedence(tmp_path):
    unit = {"RUNTIME_DIRECTORY": "/run/u:/run/v", "LOGS_DIRECTORY": "/var/log/u", "STATE_DIRECTORY": "/var/lib/u"}
    empty = {"config": written(tmp_path, "")}
    loaded = load(empty, unit)
    assert (loaded.run_dir, loaded.log_dir, loaded.state_dir) == ("/run/u", "/var/log/u", "/var/lib/u")
    embedded = load({**empty, "embedded": True, "owner_pid": 1, "head": True}, unit)
    assert (embedded.run_dir, embedded.log_dir) == (None, None), "a driver's unit is not agentd's"
    whole = load({"config": written(tmp_path, WHOLE)}, {**unit, "RLINF_ACTORS_LOG_DIR": "/e"})
    assert (whole.run_dir, whole.log_dir) == ("/run/x", "/e")


def test_reaping_needs_no_configuration_if_systemd_names_the_directory(tmp_path):
    wrong = {"config": written(tmp_path, "[haed]")}
    assert for_reaping(wrong, {"RUNTIME_DIRECTORY": "/run/u"}).run_dir == "/run/u"
    assert for_reaping({**wrong, "run_dir": "/c"}, {"RUNTIME_DIRECTORY": "/run/u"}).run_dir == "/c"
    with pytest.raises(ConfigError, match="did you mean 'head'"):
        for_reaping(wrong, {})


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ('[hardware]\ndescribed = "/nowhere.json"', "hardware.described"),
        ('[workers]\ncgroup = "/nowhere"', "workers.cgroup"),
    ],
)
def test_check_config_checks_the_named_files(tmp_path, text, path):
    with pytest.raises(ConfigError) as error:
        check_files(load({"config": written(tmp_path, text)}, {}))
    assert error.value.path == path


def test_reload_applies_env_and_lists_fields_that_need_a_restart():
    current = Config(name="a", env={"X": "1"}, stop_grace_s=3, files=("a",))
    fresh = Config(name="b", env={"X": "2"}, stop_grace_s=3, files=("a", "b"))
    changes = reload(current, fresh)
    assert changes.config == Config(name="a", env={"X": "2"}, stop_grace_s=3, files=("a", "b"))
    assert (changes.applied, changes.restart) == (("node.env",), ("node.name",))
    assert reload(current, current) == Changes(current, (), ())


def test_rules_of_launches_are_read_and_change_on_reload(tmp_path):
    path = written(tmp_path, '[admit]\ndrivers = ["a", "@arms", "@local"]\nrobots = ["@arms"]\nnested = false\n')
    config = load({"config": path, "head": True}, {})
    assert launch_rules(config) == LaunchRules(("a", "@arms", "@local"), ("@arms",), False)
    assert launch_rules(msgspec.structs.replace(config, embedded=True)) == LaunchRules(), "the driver's own"
    strict = load({"config": written(tmp_path, ""), "head": True, "strict": True}, {})
    assert launch_rules(strict) == LaunchRules(())
    assert reload(config, strict).config.drivers is None
    mapped = msgspec.structs.replace(config, users={"a": "lab-a", "b": "lab-b"})
    assert launch_rules(mapped).users == ("a", "b")
    assert launch_rules(msgspec.structs.replace(mapped, users={"a": "lab-a", "*": "lab-b"})).users is None
    many = ", ".join(f'"d{number}" = "lab"' for number in range(1025))
    path = written(tmp_path, f"[workers]\nusers = {{ {many} }}\n")
    with pytest.raises(ConfigError, match="more than 1,024 drivers"):
        load({"config": path, "head": True}, {})
    with pytest.raises(ConfigError) as error:
        load({"config": written(tmp_path, '[admit]\nrobots = ["@"]\n'), "head": True}, {})
    assert error.value.path == "admit.robots"


def test_every_field_is_named_by_its_key_in_the_file():
    in_files = {f"{table}.{key}" for table, keys in KEYS.items() for key in keys}
    named = {key_of(name) for name in Config.__struct_fields__}
    assert in_files <= named
    assert all("." not in name for name in named - in_files), "these fields have no key in the file"
    for name in Config.__struct_fields__:
        other = msgspec.structs.replace(Config(), **{name: "other"})
        changes = reload(Config(), other)
        assert changes.applied + changes.restart == (() if name == "files" else (key_of(name),))
        assert bool(changes.applied) is (name in RELOADABLE)


def test_named_file_that_is_missing_raises_config_error(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        load({"config": str(tmp_path / "none.toml")}, {})


@pytest.mark.parametrize(
    ("given", "parts", "endpoint"),
    [
        ("127.0.0.1:80", ("127.0.0.1", 80), "tcp://127.0.0.1:80"),
        ("tcp://h:1", ("h", 1), "tcp://h:1"),
        ("[::1]:9", ("::1", 9), "tcp://[::1]:9"),
        ("localhost:9", ("localhost", 9), "tcp://127.0.0.1:9"),
    ],
)
def test_addresses_are_split_and_become_endpoints(given, parts, endpoint):
    assert split_address(given, "x") == parts
    assert endpoint_of(given, "x") == endpoint


# --- the node ---


def test_described_hardware_replaces_the_probes(tmp_path):
    path = written(
        tmp_path,
        json.dumps(
            {
                "resources": [
                    {"type": "NV_GPU", "infos": [{"type": "NV_GPU", "model": "H100", "detail": {"index": 0}}]}
                ],
                "env_vars": {"ROBOT_IP": "1"},
                "labels": {"a": "b"},
                "ip": "10.1.1.1",
                "num_cpus": 128,
            }
        ),
        "hw.json",
    )
    described = node_report.read_described(path)
    config = Config(name="n", rank=3, env={"ROBOT_IP": "2"}, labels={"c": "d"})
    report = node_report.report(config, node_report.without_devices(), described, "127.0.0.1", "id", {})
    assert (report.node_id, report.hostname, report.ip, report.rank, report.num_cpus) == ("id", "n", "10.1.1.1", 3, 128)
    assert report.resources[0].infos[0].model == "H100"
    assert report.env_vars == {"ROBOT_IP": "2"}
    assert report.labels == {"a": "b", "c": "d"}
    assert report.memory_bytes > 0


def test_node_report_contains_only_variables_that_constrain_launches():
    environ = {"CUDA_VISIBLE_DEVICES": "0,1", "HF_TOKEN": "secret", "NCCL_SOCKET_IFNAME": "eth0"}
    config = Config(env={"CUDA_VISIBLE_DEVICES": "1", "WANDB_API_KEY": "secret"})
    report = node_report.report(config, node_report.without_devices(), None, "127.0.0.1", "id", environ)
    assert report.env_vars == {"CUDA_VISIBLE_DEVICES": "1", "NCCL_SOCKET_IFNAME": "eth0"}


@pytest.mark.parametrize("text", ['{"resorces": []}', "[", '{"ip": 3}'])
def test_malformed_hardware_description_is_refused(tmp_path, text):
    with pytest.raises(ConfigError, match="does not describe hardware"):
        node_report.read_described(written(tmp_path, text, "hw.json"))


@pytest.mark.parametrize(
    ("config", "listen", "head", "expected"),
    [
        (Config(ip="10.0.0.1"), "", "h", "10.0.0.1"),
        (Config(), "127.0.0.1", "", "127.0.0.1"),
        (Config(), "", "", "127.0.0.1"),
        (Config(), "10.9.9.9", "", "10.9.9.9"),
        (Config(), "", "127.0.0.1", "127.0.0.1"),
        (Config(), "", "localhost", "127.0.0.1"),
    ],
)
def test_address_for_other_nodes_follows_from_the_configuration(config, listen, head, expected):
    assert node_report.address(config, listen, head) == expected


def test_a_node_id_stays_and_differs_between_run_directories(tmp_path):
    assert (
        node_report.node_id(Config(), "/run/a")
        == node_report.node_id(Config(), "/run/a")
        != node_report.node_id(Config(), "/run/b")
    )
    assert node_report.node_id(Config(node_id="x"), "/run/a") == "x"


# --- the run directory ---


def test_run_directory_is_private_and_used_by_one_agentd(tmp_path):
    path = str(tmp_path / "run")
    first = RunDir.open(path, {})
    assert os.stat(path).st_mode & 0o777 == 0o700
    with pytest.raises(ConfigError, match="another --run-dir"):
        RunDir.open(path, {})
    first.close()
    first.close()
    RunDir.open(path, {}).close()


def test_only_an_unused_run_directory_that_agentd_has_made_is_removed(tmp_path):
    given = RunDir.open(str(tmp_path), {})
    given.remove_if_unused()
    given.close()
    made = RunDir.open(str(tmp_path / "run"), {})
    made.mark_stopping()
    make_directories(tmp_path / "run")
    record = tmp_path / "run" / "t" / "1.json"
    record.touch()
    made.remove_if_unused()
    assert record.exists()
    record.unlink()
    made.remove_if_unused()
    made.close()
    assert os.listdir(tmp_path) == ["lock"]


def test_a_run_directory_that_others_may_enter_is_refused(tmp_path):
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        RunDir.open(str(tmp_path), {})


@pytest.mark.skipif(os.getuid() != 0, reason="only root makes links that are another user's")
def test_link_of_another_user_is_refused_as_run_directory(tmp_path):
    """The default directory is in /tmp, where any user can make it first; agentd empties its `w` and `t`."""
    (tmp_path / "ours").mkdir(mode=0o700)
    (tmp_path / "run").symlink_to(tmp_path / "ours")
    RunDir.open(str(tmp_path / "run"), {}).close()
    os.chown(tmp_path / "run", 65534, 65534, follow_symlinks=False)
    with pytest.raises(ConfigError, match="belongs to user 65534, whose link it is"):
        RunDir.open(str(tmp_path / "run"), {})


def test_a_run_directory_too_long_for_sockets_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="unix sockets allow"):
        RunDir.open(str(tmp_path / ("x" * 100)), {})


def test_default_run_directory_is_the_users_own(tmp_path):
    assert default_run_dir({"XDG_RUNTIME_DIR": str(tmp_path)}) == f"{tmp_path}/rlinf-actors"
    assert default_run_dir({"XDG_RUNTIME_DIR": "/nowhere"}) == f"/tmp/rlinf-actors-{os.getuid()}"


def test_inherited_environment_omits_text_that_messages_cannot_carry(caplog):
    """One byte of Latin-1 in the environment once ended agentd at the first launch."""
    given = {"A": "\u00e9", "NOTIFY_SOCKET": "/run/x", "B": os.fsdecode(b"caf\xe9"), os.fsdecode(b"C\xff"): "c"}
    assert inherited_environment(given) == {"A": "\u00e9"}
    assert [record.args for record in caplog.records] == [("'B'",), ("'C\\udcff'",)]
