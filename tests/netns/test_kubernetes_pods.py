"""The manifests of examples/kubernetes run: as their user, without capabilities, on a read-only root, with keys as
kubelet mounts them. Each pod is a network namespace, and each of its containers a mount namespace.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import netns_kit
import pace
import pytest
import yaml
from namespaces import can_unshare

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
TOOLS = ("setpriv", "nsenter", "chroot")
TRY = "mount -t tmpfs none /mnt && mkdir /mnt/u /mnt/w /mnt/r && mount -t overlay none -o %s /mnt/r"
OVERLAY = "lowerdir=/,upperdir={0}/u,workdir={0}/w"

pytestmark = [
    pytest.mark.netns,
    pytest.mark.live,
    pytest.mark.skipif(not netns_kit.can_make_namespaces(), reason="needs root, to make network namespaces"),
    pytest.mark.skipif(
        any(shutil.which(tool) is None for tool in TOOLS)
        or not can_unshare("--mount", "sh", "-c", TRY % OVERLAY.format("/mnt")),
        reason="needs overlayfs, setpriv and nsenter",
    ),
]


def pod_of(name: str, kind: str) -> dict[str, Any]:
    """The pod of the object of this kind in a manifest."""
    documents = yaml.safe_load_all((EXAMPLES / "kubernetes" / name).read_text())
    (found,) = [document for document in documents if document["kind"] == kind]
    spec: dict[str, Any] = found["spec"]["template"]["spec"]
    spec["volumes"] += [{"name": claim["metadata"]["name"]} for claim in found["spec"].get("volumeClaimTemplates", ())]
    return spec


class Pod:
    """One pod: its network and its volumes, with the modes that kubelet gives them."""

    def __init__(
        self, folder: Path, host: netns_kit.Host, spec: dict[str, Any], secrets: Mapping[str, bytes], node: str
    ) -> None:
        self._host = host
        self._spec = spec
        self._folder = folder
        self._node = node
        self._running: subprocess.Popen[str] | None = None
        group = spec["securityContext"]["fsGroup"]
        for volume in spec["volumes"]:
            path = folder / volume["name"]
            path.mkdir(parents=True)
            os.chown(path, 0, group)
            path.chmod(0o2777)  # as emptyDir and mounted Secrets
            for name, data in secrets.items() if "secret" in volume else ():
                (path / name).write_bytes(data)
                os.chown(path / name, 0, group)
                (path / name).chmod(volume["secret"]["defaultMode"])
        (folder / "root").mkdir()

    def container(self, name: str = "", **env: str) -> list[str]:
        """The command line that runs an init container, or the pod's own container."""
        kind = "initContainers" if name else "containers"
        (container,) = [one for one in self._spec[kind] if not name or one["name"] == name]
        context, root = container["securityContext"], self._folder / "root"
        assert context["readOnlyRootFilesystem"]
        mounts = [
            f"mkdir -p {root}/r{path}; mount --bind {self._folder / name} {root}/r{path}"
            for name, path in ((mount["name"], mount["mountPath"]) for mount in container["volumeMounts"])
        ]
        script = [
            f"mount -t tmpfs none {root}",
            f"mkdir {root}/u {root}/w {root}/r",
            f"mount -t overlay none -o {OVERLAY.format(root)} {root}/r",
            f"mount --rbind /proc {root}/r/proc",
            f"mount --rbind /dev {root}/r/dev",
            f"chmod 755 {root}/r/root; mkdir {root}/r/app; cp {EXAMPLES}/container/train.py {root}/r/app",
            f"echo '10.213.7.1 head\n127.0.0.1 localhost' > {root}/r/etc/hosts",
            *mounts,
            *self._code(f"{root}/r"),
            f"mount -o remount,ro {root}/r",
            f"exec chroot {root}/r {shlex.join(self._inside(container, env))}",
        ]
        return self._host.command(["unshare", "--mount", "--propagation", "private", "sh", "-ec", "\n".join(script)])

    def _code(self, root: str) -> list[str]:
        """The commands that show the checkout and its interpreter, which may be below /tmp, to the pod's user."""
        commands = []
        for path in {ROOT, Path(sys.prefix)}:
            parents = " ".join(f"{root}{parent}" for parent in path.parents)
            commands += [f"mkdir -p {root}{path}; chmod a+x {parents}; mount --bind {path} {root}{path}"]
        return sorted(commands)  # an environment within the checkout after the checkout

    def _inside(self, container: Mapping[str, Any], env: Mapping[str, str], command: Sequence[str] = ()) -> list[str]:
        user = self._spec["securityContext"]
        assert user["runAsNonRoot"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        variables = {
            one["name"]: one["value"]
            if "value" in one
            else {"spec.nodeName": self._node}[one["valueFrom"]["fieldRef"]["fieldPath"]]
            for one in container.get("env", ())
        }
        variables |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **env}
        return [
            "setpriv", f"--reuid={user['runAsUser']}", f"--regid={user['runAsGroup']}", f"--groups={user['fsGroup']}",
            "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all",
            "env", "-i", *(f"{name}={value}" for name, value in variables.items()), *(command or container["command"]),
        ]  # fmt: skip

    def exec(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the pod's running container, as `kubectl exec` and exec probes do."""
        assert self._running is not None
        words = ["nsenter", "-t", str(self._running.pid), "--mount", "--net", "--root", "--wdns=/"]
        words += self._inside(self._spec["containers"][0], {}, command)
        return subprocess.run(
            words, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, timeout=pace.PATIENCE_S
        )

    def finish(self, name: str = "", **env: str) -> str:
        """Run a container to its end, and return its output."""
        done = subprocess.run(
            self.container(name, **env), capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
            timeout=pace.PATIENCE_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    @contextmanager
    def running(self) -> Iterator[Pod]:
        self.finish(self._spec["initContainers"][0]["name"])
        with subprocess.Popen(self.container(), stdin=subprocess.DEVNULL, text=True) as self._running:
            try:
                yield self
                self._running.terminate()
                assert self._running.wait(pace.PATIENCE_S) == 0
            finally:
                self._running.kill()

    def is_ready(self) -> bool:
        probe = self._spec["containers"][0]["readinessProbe"]
        command = probe["exec"]["command"] if "exec" in probe else ["bash", "-c", ": < /dev/tcp/127.0.0.1/6380"]
        return self.exec(*command).returncode == 0


def test_the_manifests_make_a_cluster_that_runs_a_program(place, rlinf_leak_check):
    tool = [sys.executable, "-m", "rlinf_actors.cli.main"]
    subprocess.run([*tool, "keys", "init", "--dir", f"{place}/keys"], check=True, capture_output=True)
    own = {path.name: path.read_bytes() for path in (place / "keys").iterdir()}
    enrolled: dict[str, bytes] = {}
    with netns_kit.hosts(3) as hosts, ExitStack() as stack:
        head = stack.enter_context(Pod(place / "h", hosts[0], pod_of("head.yaml", "StatefulSet"), own, "").running())
        assert pace.again_like(head.is_ready, True)
        for role, name in (("", "gpu-1"), ("--driver", "train")):
            made = head.exec(
                *filter(None, ["rlinf-actors", "keys", "enroll", name, role, "--file", f"/tmp/{name}.key"])
            )
            assert made.returncode == 0, made.stderr
            enrolled[name] = (place / "h" / "tmp" / f"{name}.key").read_bytes()
        keys = {"gpu-1.key": enrolled["gpu-1"]}
        agent = Pod(place / "a", hosts[1], pod_of("agents.yaml", "DaemonSet"), keys, "gpu-1")
        assert pace.again_like(stack.enter_context(agent.running()).is_ready, True)
        train = Pod(place / "t", hosts[2], pod_of("train.yaml", "Job"), {"driver.key": enrolled["train"]}, "")
        train.finish("keys")
        assert train.finish(RLINF_ACTORS_NUM_NODES="1") == "[0]\n"
