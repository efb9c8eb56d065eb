"""A real systemd that runs our units, as process 1 of its own namespaces and in its own cgroup."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pace
import pytest

from rlinf_actors import procfs

SYSTEMD = "/lib/systemd/systemd"
BOOT = """
set -e
mount --make-rprivate /
eval "$5"
mount --make-rshared /      # what a container manager leaves; credentials are mounted for services
for part in ${3:+bin sbin lib/systemd lib/x86_64-linux-gnu}; do
    [ ! -d "$3/usr/$part" ] || mount -t overlay overlay -o "lowerdir=$3/usr/$part:/usr/$part" "/usr/$part"
done
mount -t proc proc /proc
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /var/lib
mount -t tmpfs tmpfs /var/log
umount -l /sys/fs/cgroup
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mkdir -p /run/systemd/system
cp -r "$1"/. /run/systemd/system
export container=test NOTIFY_SOCKET="$2"
exec "$4" --system --unit=box.target --log-target=null --show-status=no
"""
TARGET = "[Unit]\nDefaultDependencies=no\nRequires=systemd-journald.service\nAfter=systemd-journald.service\n"


def unusable() -> str:
    """Return why no such systemd can be started here, or ""."""
    if os.getuid() != 0:
        return "needs root"
    missing = [tool for tool in (SYSTEMD, "unshare", "nsenter", "systemctl") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} is not installed"
    if os.path.isdir("/run/systemd/system"):
        return "this machine's own systemd has the cgroups"
    if subprocess.run(["unshare", "-mpuiC", "--fork", "true"], capture_output=True, check=False).returncode:
        return "no namespaces can be made"
    point = unified()
    return "" if point and os.access(f"{point}/cgroup.procs", os.W_OK) else "cgroup v2 is not here, or not writable"


def unified() -> str:
    """Return the mount point of cgroup v2."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        if after.startswith("cgroup2 "):
            return before.split()[4]
    return ""


class Box:
    """The running systemd. `ctl` and `popen` run commands in its namespaces."""

    def __init__(self, pid: int, cgroup: Path) -> None:
        self.pid = pid
        self.cgroup = cgroup
        self._enter = ["nsenter", "-t", str(pid), "-m", "-p", "-u", "-i", "-C"]

    def ctl(self, *arguments: str) -> str:
        """Run systemctl. If it fails, fail the test and show the journal."""
        done = subprocess.run([*self._enter, "systemctl", *arguments], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            log = subprocess.run([*self._enter, "journalctl", "--no-pager", "-n", "50"], capture_output=True, text=True)
            pytest.fail(f"systemctl {' '.join(arguments)}: {done.stderr}\n{log.stdout}")
        return done.stdout.strip()

    def popen(self, *command: str, **env: str) -> subprocess.Popen[str]:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        return subprocess.Popen([*self._enter, *command], env={**os.environ, **env}, **pipes)

    def processes(self, unit: str) -> list[int]:
        """The processes of a unit, by their pids outside the namespace."""
        return [
            int(pid) for procs in self.cgroup.glob(f"**/{unit}/**/cgroup.procs") for pid in procs.read_text().split()
        ]


@contextlib.contextmanager
def box(units: dict[str, str], version: str = "", prepare: str = "") -> Iterator[Box]:
    """Boot with these files in /run/systemd/system; remove everything afterwards.

    Args:
        units: name to text.
        version: a directory with another systemd than this machine's: Debian packages that `dpkg -x` unpacked there,
            with the libraries that this machine lacks for it, all of it below usr.
        prepare: a shell command that arranges the mount namespace.
    """
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(tempfile.TemporaryDirectory(prefix="sd-", dir="/tmp"))
        for name, text in {**units, "box.target": TARGET}.items():
            file = Path(place, "units", name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        ready = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        ready.bind(f"{place}/ready")
        ready.settimeout(pace.PATIENCE_S)
        cgroup = Path(unified(), os.path.basename(place))
        cgroup.mkdir()
        stack.callback(remove, cgroup)
        command = [
            "sh", "-c", 'echo 0 > "$0/cgroup.procs"; exec unshare -mpuiC --fork --kill-child=SIGKILL sh -c "$@"',
            str(cgroup), BOOT, "boot", f"{place}/units", f"{place}/ready", version, SYSTEMD, prepare,
        ]  # fmt: skip
        started = stack.enter_context(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL))
        stack.callback(started.kill)
        while b"READY=1" not in ready.recv(4096):
            pass
        (pid,) = procfs.children(started.pid)
        end = os.pidfd_open(pid)
        stack.callback(os.close, end)
        stack.callback(select.select, [end], [], [])  # the kernel has ended all of its namespace by then
        stack.callback(signal.pidfd_send_signal, end, signal.SIGKILL)
        yield Box(pid, cgroup)


def remove(cgroup: Path) -> None:
    """Remove a cgroup without processes, and its children."""
    for directory, _, _ in sorted(os.walk(cgroup), reverse=True):
        os.rmdir(directory)
