"""`rlinf-actors doctor --bundle`: complete for a bug report, and without what its readers must not see."""

from __future__ import annotations

import io
import json
import os
import sys
import tarfile
from pathlib import Path

import pytest

from rlinf_actors import Worker, WorkerDiedError
from rlinf_actors.cli import app
from rlinf_actors.cli.doctor.bundle import write_bundle
from rlinf_actors.cli.doctor.cluster import ClusterFacts
from rlinf_actors.cli.doctor.redaction import REMOVED, Redactor
from rlinf_actors.errors import UsageError
from rlinf_actors.security.keypair import KeyPair
from rlinf_actors.settings import CLIENT_CONFIG, Settings

PLANTED = {
    name: f"planted-{name}-5f2a"
    for name in ("environment", "printed", "raised", "agentd", "client", "webhook", "bearer", "comment")
}
"""Secrets, and data of users, by where they are."""


class Careless(Worker):
    def fail(self) -> None:
        raise ValueError(f"the patient is {PLANTED['raised']}")

    def die(self) -> None:
        print(f"password={PLANTED['printed']}", PLANTED["printed"], file=sys.stderr, flush=True)
        os._exit(3)


def content(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        names = archive.getnames()
        assert all(name.startswith("rlinf-actors-bundle/") and ".." not in name for name in names)
        files = {name.partition("/")[2]: archive.extractfile(name) for name in names}
        return {name: io.TextIOWrapper(file, "utf-8").read() for name, file in files.items() if file is not None}


@pytest.mark.live
def test_archive_has_what_happened_and_no_secret(local_cluster, monkeypatch, tmp_path):
    config = tmp_path / "agentd.toml"
    config.write_text(
        f'# {PLANTED["comment"]}\n[node]\nenv = {{WANDB_API_KEY = "{PLANTED["agentd"]}"}}\n'
        f'[notify]\nwebhook = "https://hooks.example/{PLANTED["webhook"]}"\n[workers]\nlog_keep_days = 3.0\n'
    )
    local = local_cluster(num_nodes=1)
    for name, value in {**local.driver_env, "HF_TOKEN": PLANTED["environment"]}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RLINF_ACTORS_CONFIG", str(config))
    cluster = local.cluster(namespace="cell")
    Careless.create_group().launch(cluster, name="careful")
    group = Careless.create_group().launch(cluster, name="careless")
    with pytest.raises(ValueError, match="patient"):
        group.fail().wait()
    with pytest.raises(WorkerDiedError):
        group.die().wait()

    path = tmp_path / "bundle.tar.gz"
    assert app.run(["doctor", "--bundle", str(path)]) in (0, 1)
    assert path.stat().st_mode & 0o777 == 0o600
    files = content(path)
    whole = "\n".join([*files, *files.values()])
    keys = [line.split()[1] for file in Path(local.keys).glob("*.key") for line in file.read_text().splitlines()
            if line.startswith("secret ")]  # fmt: skip
    assert keys
    for secret in (*PLANTED.values(), *keys):
        assert secret not in whole

    assert {"REDACTED.txt", "doctor.json", "status.json", "nodes.json", "jobs.json", "groups.json", "workers.json",
            "events.jsonl", "versions.json", "logs/agentd-node0.txt"} <= files.keys()  # fmt: skip
    events = [json.loads(line) for line in files["events.jsonl"].splitlines()]
    (death,) = [event for event in events if event["kind"] == "worker_died"]
    assert death["group"] == "careless"
    assert death["exit"]["exit_code"] == 3
    assert set(death["exit"]["stderr_tail"]) == {REMOVED}
    assert json.loads(files["groups.json"])[0]["name"] == "careful"
    assert "is registered; head:" in files["logs/agentd-node0.txt"]
    assert json.loads(files["doctor.json"])["nodes"][0]["node"] == "node0"
    assert json.loads(files["versions.json"])["packages"]["msgspec"]
    shown = json.loads(files[f"config{config}.json"])
    assert shown["workers"] == {"log_keep_days": 3.0}
    assert shown["node"] == {"env": {"WANDB_API_KEY": REMOVED}}


def test_archive_is_written_without_a_cluster_and_replaces_no_file(monkeypatch, tmp_path, capsys):
    client = tmp_path / "client.toml"
    client.write_text(f'head = "{PLANTED["client"]}"\nhaed = 1\n')
    monkeypatch.setenv(CLIENT_CONFIG, str(client))
    path = tmp_path / "b.tar.gz"
    assert app.run(["doctor", "--bundle", str(path)]) == 1, "the client file is wrong"
    assert json.loads(content(path)["doctor.json"])["fail"] >= 1
    before = path.read_bytes()
    assert app.run(["doctor", "--bundle", str(path)]) == 64
    assert "exists already" in capsys.readouterr().err
    assert path.read_bytes() == before
    assert app.run(["doctor", "--bundle", str(tmp_path / "no" / "b.tar.gz")]) == 64
    with pytest.raises(UsageError, match="cannot be written"):
        write_bundle(path, {}, Settings(), "", None, ClusterFacts())


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("its script failed: ValueError: patient 7", f"its script failed: ValueError: {REMOVED}"),
        ("its script failed: lab.Odd: patient 7", f"its script failed: lab.Odd: {REMOVED}"),
        ("its script exited with 'patient 7'", f"its script exited with: {REMOVED}"),
        ("its script exited with code 3", "its script exited with code 3"),
        ("worker g:0 ended; lab.errors.BadError: patient 7", f"worker g:0 ended; lab.errors.BadError: {REMOVED}"),
        (
            "OSError: [Errno 28] No space left on device: '/p/7'",
            f"OSError: [Errno 28] No space left on device {REMOVED}",
        ),
        ("Traceback (most recent call last):\n  x = 'patient'\nE: p", f"{REMOVED} (a traceback)"),
        ("https://kim:pw1234@host/x", f"https://{REMOVED}@host/x"),
        ("Authorization: Bearer abcdefghij123", f"Authorization: Bearer {REMOVED}"),
        ("--api-key=abcdef1 --n 3", f"--api-key={REMOVED} --n 3"),
        ("token: 'abcdef1'", f"token: '{REMOVED}'"),
        ("key sk-abcdefgh123 of", f"key {REMOVED} of"),
        ("use rlinf-join-abc_DEF-1 now", f"use {REMOVED} now"),
        ("node n1 (10.0.0.1) is lost", "node n1 (10.0.0.1) is lost"),
        ("the key of agent 'far' (-T#]&=]x) is listed", "the key of agent 'far' (-T#]&=]x) is listed"),
    ],
)
def test_texts_lose_secrets_and_words_of_users(text, shown):
    assert Redactor().text(text) == shown


def test_known_secrets_are_removed_wherever_they_are():
    pair = KeyPair.make()
    found = Redactor([pair.secret, "abc"]).value({pair.secret: [f"x{pair.secret}y", "abc"]})
    assert found == {REMOVED: [f"x{REMOVED}y", "abc"]}


def test_fields_whose_names_say_secret_lose_their_values():
    given = {
        "token": "t",
        "webhook_file": "f",
        "keys": ["driver"],
        "stderr_tail": ["a", "b"],
        "env": {"A": "x"},
    }
    assert Redactor().value(given) == {
        "token": REMOVED, "webhook_file": REMOVED, "keys": ["driver"], "stderr_tail": [REMOVED] * 2,
        "env": {"A": REMOVED},
    }  # fmt: skip
