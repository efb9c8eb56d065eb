"""Manifests, compose file and Dockerfile are valid, name what exists, and ask for no privilege. No engine is needed.

tests/netns/test_kubernetes_pods.py runs the manifests' containers.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from agentd import command_line
from rlinf_actors.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
CONTAINER = ROOT / "examples" / "container"
SCHEMA = json.loads(Path(__file__).with_name("kubernetes-schema.json").read_text())
OBJECTS = [
    (path.name, document)
    for path in sorted((ROOT / "examples" / "kubernetes").glob("*.yaml"))
    for document in yaml.safe_load_all(path.read_text())
]
PODS = [
    (f"{name} {document['kind']}", document["spec"]["template"]["spec"])
    for name, document in OBJECTS
    if "template" in document.get("spec", {})
]
COMPOSE = yaml.safe_load((CONTAINER / "compose.yaml").read_text())
MADE_BY_THE_USER = {"rlinf-head", "rlinf-agents", "rlinf-driver"}
"""Secrets that docs/how-to/kubernetes.md tells to make."""


def faults(document: dict[str, Any]) -> list[str]:
    """What the API server would refuse in an object, also unknown fields."""
    kind = SCHEMA["kinds"].get(f"{document.get('apiVersion')} {document.get('kind')}")
    if kind is None:
        return [f"unknown kind {document.get('kind')}"]
    validator = jsonschema.Draft202012Validator({"$ref": f"#/$defs/{kind}", "$defs": SCHEMA["$defs"]})
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(document)]


@pytest.mark.parametrize(("name", "document"), OBJECTS, ids=[f"{name} {it['kind']}" for name, it in OBJECTS])
def test_manifests_have_the_fields_and_types_of_kubernetes(name, document):
    assert faults(document) == []


def test_a_misspelt_field_and_a_wrong_type_are_faults():
    (job,) = [document for _, document in OBJECTS if document["kind"] == "Job"]
    wrong = json.loads(json.dumps(job))
    wrong["spec"]["template"]["spec"]["containers"][0]["readOnlyFilesystem"] = True
    wrong["spec"]["backoffLimit"] = "none"
    assert len(faults(wrong)) == 2


@pytest.mark.parametrize(("name", "pod"), PODS, ids=[name for name, _ in PODS])
def test_pods_have_no_privilege_and_their_volumes_exist(name, pod):
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert {volume["secret"]["secretName"] for volume in volumes.values() if "secret" in volume} <= MADE_BY_THE_USER
    assert not any("hostPath" in volume for volume in volumes.values())
    claims = {
        claim["metadata"]["name"] for _, it in OBJECTS for claim in it.get("spec", {}).get("volumeClaimTemplates", ())
    }
    for container in (*pod["initContainers"], *pod["containers"]):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
        }  # fmt: skip
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes.keys() | claims
        assert "memory" in container["resources"]["requests"]


@pytest.mark.parametrize(
    ("file", "taint"), [("agents.yaml", "nvidia.com/gpu"), ("robots.yaml", "rlinf/robot")], ids=["gpu", "robot"]
)
def test_nodes_run_on_the_tainted_machines_that_are_for_them(file, taint):
    (pod,) = [pod for name, pod in PODS if name.startswith(f"{file} DaemonSet")]
    assert {"key": taint, "operator": "Exists", "effect": "NoSchedule"} in pod["tolerations"]
    page = (ROOT / "docs" / "how-to" / "kubernetes.md").read_text()
    assert re.search(rf"{taint}=?:NoSchedule", page)


def test_selectors_labels_and_names_belong_together():
    by_kind = {(document["kind"], document["metadata"]["name"]): document for _, document in OBJECTS}
    for (kind, name), document in by_kind.items():
        assert kind == "Namespace" or document["metadata"]["namespace"] == "rlinf", (kind, name)
        if kind in ("StatefulSet", "DaemonSet"):
            labels = document["spec"]["template"]["metadata"]["labels"]
            assert document["spec"]["selector"]["matchLabels"].items() <= labels.items()
        if "template" in document.get("spec", {}):
            assert document["spec"]["template"]["metadata"]["labels"]["cluster"] == "rlinf"  # of the NetworkPolicy
    service = by_kind["Service", "head"]["spec"]
    assert (
        service["selector"].items() <= by_kind["StatefulSet", "head"]["spec"]["template"]["metadata"]["labels"].items()
    )


def programs() -> list[list[str]]:
    """The commands of ours in the manifests and in the compose file."""
    given = [container["command"] for _, pod in PODS for container in pod["containers"]]
    given += [service["command"] for service in COMPOSE["services"].values()]
    commands = []
    for command in given:
        words = list(command)
        if words[:2] == ["sh", "-c"]:
            words = [word for word in shlex.split(words[2])[1:] if ">" not in word]
        commands.append(words)
    return commands


@pytest.mark.parametrize("words", programs(), ids=" ".join)
def test_commands_are_ones_that_the_programs_take(words):
    if words[0] == "agentd":
        assert command_line.parser().parse_args(words[1:]).connect == "head:6380"
    elif words[0] == "rlinf-actors":
        parent = app.make_context("rlinf-actors", words[1:], resilient_parsing=True)
        command = app.get_command(parent, words[1])
        assert command is not None
        context = command.make_context(words[1], words[2:], parent, resilient_parsing=True)
        assert context.params["listen"] == "0.0.0.0:6380"
    else:
        assert words == ["python", "/app/train.py"]


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_services_of_the_compose_file_have_no_privilege(name):
    service = COMPOSE["services"][name]
    assert service["user"] == "1000:1000"
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "cap_add", "devices", "network_mode", "pid", "ipc"} & service.keys()
    assert set(service.get("depends_on", ())) <= COMPOSE["services"].keys()
    known = {
        "image", "build", "init", "user", "read_only", "cap_drop", "security_opt", "tmpfs", "stop_grace_period",
        "restart", "command", "environment", "volumes", "depends_on", "shm_size", "profiles",
    }  # fmt: skip
    assert service.keys() <= known
    for volume in service["volumes"]:
        assert re.fullmatch(r"\./[\w./]+:/[\w./]+(:ro)?", volume)
        assert volume.endswith(":ro") or volume == "./state:/state"


@pytest.mark.skipif(
    shutil.which("docker") is None
    or subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode != 0,
    reason="needs docker compose",
)
def test_docker_compose_takes_the_file():
    subprocess.run(["docker", "compose", "-f", str(CONTAINER / "compose.yaml"), "config", "--quiet"], check=True)


def stages() -> list[list[tuple[str, str]]]:
    """The instructions of the Dockerfile, by stage."""
    lines = [line for line in (CONTAINER / "Dockerfile").read_text().splitlines() if line and not line.startswith("#")]
    found: list[list[tuple[str, str]]] = []
    for line in lines:
        instruction, _, rest = line.partition(" ")
        if instruction == "FROM":
            found.append([])
        found[-1].append((instruction, rest))
    return found


def test_the_image_runs_as_a_user_by_number_and_has_no_compiler_cache_or_secret():
    *_, last = stages()
    assert {instruction for stage in stages() for instruction, _ in stage} <= {
        "FROM", "COPY", "RUN", "ENV", "USER", "CMD", "ENTRYPOINT",
    }  # fmt: skip
    assert dict(last)["USER"] == "1000:1000"  # runAsNonRoot cannot check a name
    for stage in stages():
        assert re.match(r"python:\d\.\d+-slim( AS \w+)?$", stage[0][1])
        for instruction, rest in stage:
            assert instruction != "RUN" or "pip install" not in rest or "--no-cache-dir" in rest


def test_the_context_has_what_the_image_copies_and_nothing_else():
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    copied = [word for instruction, rest in stages()[0] if instruction == "COPY" for word in rest.split()[:-1]]
    assert [line for line in lines if line[0] not in "#!"] == ["*", "**/__pycache__"]
    assert sorted(line[1:] for line in lines if line[0] == "!") == sorted(copied)


def test_the_files_that_the_image_copies_suffice_to_build_the_package(tmp_path):
    for instruction, rest in stages()[0]:
        if instruction == "COPY":
            *sources, target = rest.split()
            folder = tmp_path / target.lstrip("/")
            for source in sources:
                path = ROOT / source
                if path.is_dir():
                    shutil.copytree(path, folder, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    folder.mkdir(parents=True, exist_ok=True)
                    shutil.copy(path, folder)
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(tmp_path),
        str(tmp_path / "src"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(tmp_path.glob("rlinf_actors-*.whl"))) == 1
