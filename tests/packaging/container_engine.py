"""A container engine for tests: podman or Docker, and the image of examples/container built by it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pace
import yaml

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
BASE = "python:3.11-slim"
BUILD_S = 1200.0
LOCKED = (
    "--read-only", "--cap-drop=all", "--security-opt=no-new-privileges", "--tmpfs=/tmp:exec", "--env=HOME=/tmp",
)  # fmt: skip
"""Options that give a container what the manifests and the compose file give theirs."""


class Engine:
    """A container engine. *name* is its program."""

    def __init__(self, name: str) -> None:
        self.name = name

    def run(self, *words: str, check: bool = True, timeout: float = pace.PATIENCE_S) -> str:
        """Run the engine's program, and return what it prints on stdout."""
        done = self.attempt(*words, timeout=timeout)
        assert not check or done.returncode == 0, f"{self.name} {' '.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout

    def attempt(self, *words: str, timeout: float = pace.PATIENCE_S) -> subprocess.CompletedProcess[str]:
        return run(self.name, *words, timeout=timeout)

    def works(self) -> bool:
        return shutil.which(self.name) is not None and self.attempt("info").returncode == 0

    def has_base(self) -> bool:
        """True if the image that the Dockerfile begins with is here, or can be fetched."""
        return any(self.attempt(*words, BASE).returncode == 0 for words in (("image", "inspect"), ("pull",)))

    @contextlib.contextmanager
    def image(self) -> Iterator[str]:
        """Build the image of the Dockerfile, and remove it at the end. Yield its name."""
        name = f"localhost/rlinf-actors-test:{os.getpid()}"
        layers = ("--layers=false",) if self.name == "podman" else ()  # else the first stage stays
        file = EXAMPLES / "container" / "Dockerfile"
        self.run("build", *layers, "--file", str(file), "--tag", name, str(ROOT), timeout=BUILD_S)
        try:
            yield name
        finally:
            self.run("rmi", "--force", name)

    @contextlib.contextmanager
    def container(self, *words: str) -> Iterator[str]:
        """Run a container in the background, and remove it at the end. Yield its id."""
        container = self.run("run", "--detach", *words).strip()
        try:
            yield container
        finally:
            self.run("rm", "--force", "--volumes", container)

    def log(self, container: str) -> str:
        done = self.attempt("logs", container)
        return done.stdout + done.stderr

    def exit_code(self, container: str) -> str:
        return self.run("inspect", "--format", "{{.State.ExitCode}}", container).strip()

    def stop(self, container: str) -> str:
        """Stop a container as kubelet and compose do, and return its exit code: 137 if it had to be killed."""
        self.run("stop", "--time", "30", container, timeout=pace.PATIENCE_S + 30)
        return self.exit_code(container)


def run(*words: str, timeout: float = pace.PATIENCE_S, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, timeout=timeout, **options
    )


def mount_secret(folder: Path, keys: Mapping[str, bytes], group: int, mode: int) -> Path:
    """Lay keys out as kubelet mounts a Secret: links to files of root and *group* in a hidden directory."""
    hidden = folder / "..2026_11_28_07_00_00.1"
    hidden.mkdir(parents=True)
    for name, data in keys.items():
        (hidden / name).write_bytes(data)
        (hidden / name).chmod(mode)
        (folder / name).symlink_to(f"..data/{name}")
    (folder / "..data").symlink_to(hidden.name)
    for path, bits in ((folder, 0o3777), (hidden, 0o2755)):
        path.chmod(bits)
    for path in (folder, hidden, *hidden.iterdir()):
        os.chown(path, 0, group)
    return folder


class Pod:
    """A pod of a manifest under `podman kube play`, which knows neither StatefulSet, DaemonSet nor Job.

    podman 4.3 does not decode a Secret's data, and shares an emptyDir with other pods that name it so. It has no node,
    and no readiness probe: `is_ready` runs it.

    Args:
        engine: podman.
        folder: an empty directory.
        file: the manifest, and the kind of its object.
        name: of the pod, and of the node where it runs.
        keys: the files of the pod's Secret.
        changes: old and new texts of the pod's description: images, for example.
    """

    def __init__(
        self, engine: Engine, folder: Path, file: tuple[str, str], name: str, keys: Mapping[str, bytes],
        changes: Mapping[str, str],
    ) -> None:  # fmt: skip
        self._engine = engine
        self._file = folder / f"{name}.yaml"
        documents = yaml.safe_load_all((EXAMPLES / "kubernetes" / file[0]).read_text())
        (found,) = [document for document in documents if document["kind"] == file[1]]
        template = found["spec"]["template"]
        spec = template["spec"]
        (self._main,) = spec["containers"]
        self.container = f"{name}-{self._main['name']}"
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        volumes |= {claim["metadata"]["name"]: {} for claim in found["spec"].get("volumeClaimTemplates", ())}
        for container in (*spec["initContainers"], self._main):
            for variable in container.get("env", ()):
                if variable.pop("valueFrom", None) is not None:
                    variable["value"] = name
            for mount in container["volumeMounts"]:
                mount["name"] = f"{name}-{mount['name']}"
            container.pop("ports", None)  # podman would publish them
            container["resources"]["limits"].pop("nvidia.com/gpu", None)
        group = spec["securityContext"]["fsGroup"]
        spec["volumes"] = [
            {"name": f"{name}-{volume}", "hostPath": {"path": str(mount_secret(folder / name, keys, group,
             given["secret"]["defaultMode"]))}} if "secret" in given else {"name": f"{name}-{volume}", "emptyDir": {}}
            for volume, given in volumes.items()
        ]  # fmt: skip
        spec["restartPolicy"] = "Never"  # podman would restart the first container
        metadata = {"name": name, "annotations": {"io.podman.annotations.init.container.type": "always"}}
        text = yaml.safe_dump({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
        for old, new in changes.items():
            text = text.replace(old, new)
        self._file.write_text(text)

    @contextlib.contextmanager
    def running(self, network: str) -> Iterator[Pod]:
        try:
            self._engine.run("kube", "play", "--network", network, str(self._file))
            yield self
        finally:
            self._engine.run("kube", "down", str(self._file), check=False)
            for name in [volume["name"] for volume in yaml.safe_load(self._file.read_text())["spec"]["volumes"]]:
                self._engine.run("volume", "rm", "--force", name, check=False)

    def exec(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self._engine.attempt("exec", self.container, *words)

    def is_ready(self) -> bool:
        probe = self._main["readinessProbe"]
        given = probe["exec"]["command"] if "exec" in probe else ["bash", "-c", ": < /dev/tcp/127.0.0.1/6380"]
        return self.exec(*given).returncode == 0
