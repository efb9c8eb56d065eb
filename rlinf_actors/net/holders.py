"""Which process of this machine has locked a file or listens on a port, for people. Any thread; reads /proc.

The texts are for errors: what cannot be found out is left out.
"""

from __future__ import annotations

import errno
import os
import pwd
import socket
import time

from rlinf_actors import procfs
from rlinf_actors.net.head_records import script_of
from rlinf_actors.wire.program import Program, process_text

MOST_CHARS = 200
"""Longest command line in a text."""


def program_of(pid: int) -> Program:
    """Return who runs what in the process *pid* of this machine. Secrets are left out of the command line."""
    uid = procfs.user_of(pid)
    try:
        user = pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        user = f"user {uid}"
    found, started = procfs.stat(pid), 0.0
    if found is not None:
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - found.started / os.sysconf("SC_CLK_TCK")
        started = time.time() - age
    return Program(user, socket.gethostname()[:256], script_of(pid)[:MOST_CHARS], started)


def process(pid: int) -> str:
    """Return "ann's `agentd --head` (pid 77 on gpu-1, started 3 h ago)"."""
    return process_text(program_of(pid), pid, time.time())


def of_lock(path: str, kind: str = "FLOCK") -> str:
    """Return the process that has locked the file *path*, "" if that is not known, as in another pid namespace.

    *kind* is "FLOCK" for flock(2), "POSIX" for fcntl(2).
    """
    try:
        found = os.stat(path)
    except OSError:
        return ""
    pid = procfs.locks(kind).get((found.st_dev, found.st_ino), 0)
    return process(pid) if pid > 0 else ""


def of_port(port: int) -> str:
    """Return the process that listens on a TCP port, "" if that is not known: of another user, or without psutil."""
    try:
        import psutil  # of the extra [cli]
    except ModuleNotFoundError:
        return ""
    try:
        found = psutil.net_connections("tcp")
    except psutil.Error:
        return ""
    listening = (one for one in found if one.status == psutil.CONN_LISTEN and one.laddr and one.laddr.port == port)
    pid = next((one.pid for one in listening if one.pid), 0)
    return process(pid) if pid else ""


def in_use(endpoint: str, error: OSError) -> str:
    """Return what to say behind "cannot listen on ENDPOINT: Address already in use"; "" for another *error*."""
    port = endpoint.rpartition(":")[2]
    if error.errno != errno.EADDRINUSE or not port.isdecimal():
        return ""
    who = of_port(int(port))
    if not who:
        return f"; `ss -ltnp 'sport = :{port}'` as root shows by which process. End that one, or choose another port"
    return f", by {who}: end that one, or choose another port"
