"""Configuration files that would make a process wait, or use up its memory or stack, are refused at once."""

import os

import pytest

from agentd import config as agentd_config
from agentd.config_fields import KEYS
from agentd.node_report import read_described
from rlinf_actors import config_files
from rlinf_actors.codesync import pip_settings
from rlinf_actors.config.cluster_config import ClusterConfig
from rlinf_actors.config.config_values import load_yaml, parse_env_vars, parse_requirements
from rlinf_actors.config.profiling_config import RocprofSysConfig
from rlinf_actors.errors import ConfigError
from rlinf_actors.net.discovery import read_client_file
from rlinf_actors.security import keyfile
from rlinf_actors.settings import Settings
from rlinf_actors.toml_text import parse_toml

BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}\n" for n in range(1, 40))
CHAIN = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 200))

READERS = {
    "yaml": load_yaml,
    "agentd.toml": lambda path: agentd_config.read(path),
    "client.toml": lambda path: read_client_file(str(path)),
    "text": config_files.read_text,
    "--hardware": lambda path: read_described(str(path)),
    "requirements": lambda path: parse_requirements(str(path), "requirements"),
    "key": keyfile.load,
    "credential": lambda path: keyfile.locate(Settings(credentials_dir=str(path.parent)), "driver"),
}


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
@pytest.mark.parametrize("device", ["fifo", "/dev/zero"])
def test_a_fifo_or_device_is_refused(tmp_path, reader, device):
    tmp_path.chmod(0o700)
    path = tmp_path / "driver.key"
    os.mkfifo(path, 0o600) if device == "fifo" else path.symlink_to(device)
    with pytest.raises(ConfigError, match=r"is not a regular file|must be private") as refusal:
        reader(path)
    assert str(path) in str(refusal.value)


def test_a_fifo_among_the_settings_of_uv_counts_as_no_file(tmp_path):
    (tmp_path / "uv").mkdir()
    os.mkfifo(tmp_path / "uv" / "uv.toml")
    assert pip_settings.read({"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}, str(tmp_path)).fingerprint


def test_a_described_machine_that_nests_deeply_is_refused(tmp_path):
    path = tmp_path / "hardware.json"
    path.write_text('{"x": ' + "[" * 100_000)
    with pytest.raises(ConfigError, match="does not describe hardware") as refusal:
        read_described(str(path))
    assert refusal.value.path == str(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BOMB, "more than 100,000 values at line .*, with those of its aliases"),
        (MERGES, "more than 100,000 values"),
        (CHAIN, "nested deeper than 64 levels"),
        ("a: " + "[" * 10_000, "nested deeper than 64 levels"),
        ("a: " + "{a: " * 100_000, "nested deeper than 64 levels"),
        ("a: &a [*a]", "line 1 contains itself, by an alias"),
        ("a: &a {<<: *a}", "contains itself"),
        ("a" * (config_files.MAX_BYTES + 1), "more than 1,048,576 bytes"),
    ],
    ids=["aliases", "merge keys", "chain", "lists", "mappings", "itself", "merges itself", "long"],
)
def test_yaml_that_grows_or_nests_without_end_is_refused(tmp_path, text, said):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said) as refusal:
        load_yaml(path)
    assert refusal.value.path == str(path)


def test_usual_aliases_of_yaml_are_read(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("base: &base {x: 1}\none: {<<: *base, y: 2}\nlist: [*base, *base]\nempty:\n")
    assert load_yaml(path)["one"] == {"x": 1, "y": 2}
    path.write_text("")
    assert load_yaml(path) is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("node = " + "[" * 10_000, "nested too deeply"),
        ("node = " + "{a = " * 10_000, "nested too deeply"),
        ("[" + ".".join(["a"] * 100_000) + "]", "line 1 has a key of more than 64 parts"),
        ('"\\""' + " . 'a.b'" * 100_000 + " = 1", "line 1 has a key of more than 64 parts"),
        ('"\u2028".' * 5_000 + "a = 1", "line 1 has a key of more than 64 parts"),
        ("a" + ".a" * 64 + " = " + '"\\' * 25_000, "line 1 has a key of more than 64 parts|is not TOML"),
        ("a = " + "9" * 5_000, "is not TOML: Exceeds the limit"),
    ],
    ids=["lists", "tables", "header", "key", "lines in a key", "no end of strings", "digits"],
)
@pytest.mark.parametrize("reader", ["agentd.toml", "client.toml"])
def test_toml_that_nests_deeply_is_refused(tmp_path, reader, text, said):
    path = tmp_path / reader
    path.write_text(text[: 60_000 if "client" in reader else None])
    with pytest.raises(ConfigError, match=said):
        READERS[reader](path)


def test_a_long_text_with_dots_is_no_deep_key():
    long = ".".join(["a"] * 1000)
    assert parse_toml(f"x = \"{long}\" # {long}\ny = '{long}'", "file") == {"x": long, "y": long}


def test_a_long_client_file_is_refused_and_not_cut_off(tmp_path):
    path = tmp_path / "client.toml"
    path.write_text('head = "10.0.0.1:6380"\n#' + "x" * 70_000)
    with pytest.raises(ConfigError, match="has more than 65,536 bytes"):
        read_client_file(str(path))


@pytest.mark.parametrize("name", ["", "a=b", "a\0b"])
def test_wrong_names_of_variables_are_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="cannot be the name of an environment variable"):
        parse_env_vars([{name: "x"}], "env_vars")
    with pytest.raises(ConfigError, match=r"empty name|cannot be the name of an environment variable"):
        RocprofSysConfig(env={name: "x"})
    path = tmp_path / "agentd.toml"
    path.write_text(f'[node.env]\n"{name.replace(chr(0), "u0000" and chr(92) + "u0000")}" = "x"\n')
    with pytest.raises(ConfigError, match=r"node\.env: .* cannot be the name of an environment variable"):
        agentd_config.load({"config": str(path)}, {})


@pytest.mark.parametrize("value", ["inf", "nan", "1e300"])
@pytest.mark.parametrize("key", KEYS["timers"])
def test_timers_have_upper_bounds(tmp_path, key, value):
    path = tmp_path / "agentd.toml"
    path.write_text(f"[timers]\n{key} = {value}\n")
    with pytest.raises(ConfigError, match=f"timers.{key}: is .*; it must be at most"):
        agentd_config.load({"config": str(path)}, {})


def test_a_configuration_object_that_grows_or_contains_itself_is_refused():
    """A program has read the file itself: an alias is one object in several places."""
    value = {"x": 1}
    for _ in range(40):
        value = {"a": value, "b": value}
    loop: dict = {}
    loop["loop"] = loop
    for bad in (value, loop):
        with pytest.raises(ConfigError, match=r"more than 100,000 values, or contains itself|nested too deeply"):
            ClusterConfig.from_any({"num_nodes": 1, "node_groups": bad})
