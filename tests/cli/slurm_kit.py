"""A real Slurm of two nodes, n1 and n2, on this machine: munged, slurmctld and two slurmds."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pace

from rlinf_actors.net.host import HeldPorts

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "salloc", "sbatch")
_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"

CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=10
StateSaveLocation={folder}/ctl
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/ctl.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/ctl.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
KillWait=30
JobRequeue=1
NodeName=n1 NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName=n2 NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=all Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Why Slurm cannot run here, "" if it can."""
    if os.geteuid() != 0:
        return "needs root, to run Slurm"
    gone = [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]
    return f"needs {', '.join(gone)} (.ci/debian-packages)" if gone else ""


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """Run Slurm in *folder*. Gives the variables by which its commands find it."""
    for name in ("ctl", "n1", "n2", "munge"):
        (folder / name).mkdir(mode=0o700)
    key = folder / "munge" / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    with contextlib.closing(HeldPorts()) as held:
        ports = [held.hold() for _ in range(3)]
        host = socket.gethostname().partition(".")[0]
        (folder / "slurm.conf").write_text(CONFIG.format(folder=folder, host=host, ports=ports))
    conf = str(folder / "slurm.conf")
    env = {**os.environ, "PATH": _PATH, "SLURM_CONF": conf}
    places = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    munge = [f"--{option}={folder}/munge/{name}" for option, name in places.items()]
    with contextlib.ExitStack() as stack:
        stack.enter_context(_running(["munged", "--foreground", "--force", *munge], env))
        assert pace.again_like((folder / "munge" / "socket").exists, True)
        stack.enter_context(_running(["slurmctld", "-D", "-f", conf], env))
        for node in ("n1", "n2"):
            stack.enter_context(_running(["slurmd", "-D", "-N", node, "-f", conf], env))
        assert pace.again_like(lambda: _output(["sinfo", "-h", "-o", "%D %T"], env), "2 idle\n") == "2 idle\n"
        yield {"SLURM_CONF": conf, "PATH": env["PATH"]}


@contextlib.contextmanager
def _running(command: list[str], env: dict[str, str]) -> Iterator[None]:
    with subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(pace.PATIENCE_S)
            finally:
                process.kill()


def _output(command: list[str], env: dict[str, str]) -> str:
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=pace.PATIENCE_S).stdout
