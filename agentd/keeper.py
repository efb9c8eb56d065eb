"""The keeper: a small program that starts templates, and kills the processes that ended templates leave behind.

``python -I -S keeper.py LISTENER PATH [stay]``: agentd runs its own keeper, or ``agentd --keeper`` runs the keeper of
rlinf-workers@.service. LISTENER is an inherited listening socket; PATH is its path, shown by ps. The keeper outlives
agentd. ``python -I -S keeper.py as FD PROGRAM ...`` is no keeper: see `run_as`.

Theory of operation. agentd connects to the keeper's socket, says hello, and asks the keeper to start templates. The
keeper is the parent of every template, and a subreaper: when a template ends, whatever ran below it becomes the
keeper's child, however it was started and whatever it did to hide (setsid, double fork, an empty environment). Living
templates are subreapers too. So each child of the keeper that is no template comes from an ended template. The keeper
kills it after ORPHANS_S, in which watchdogs end their robot workers. The keeper knows no workers and needs no marks.

A driver whose agentd was killed sends the order "wait". The keeper then keeps that connection open until it ends
itself, so the driver learns of the keeper's end.

The keeper ends when it has no agentd and no child; with ``stay`` only by SIGTERM, which ends all templates first. If
the keeper itself is killed, templates go on (those that are still importing end), and agentd starts another keeper.

House rules:
* One thread, one poll loop. Nothing blocks, not even the execution of a program, whose user can hold it up by a lease
  (fcntl). Imports little, and from the standard library only: the keeper runs for long.
* It takes orders from processes of its own user alone, but not from those below it, which are workers. It has one
  agentd at a time: the last that said hello.
* A process of another user than the keeper's changes its user before it executes the template: afterwards it would not
  be dumpable.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import time

MAX_PACKET = 65536
CONTROL, OWNER = 3, 4
"""Descriptors of a template: the socket to its agentd, and the pidfd of the driver that owns agentd, if any."""
ORPHANS_S = 2.75
"""Seconds from a template's end until the keeper kills its workers: ROBOT_GONE_S of wire.template_protocol."""
EXEC_S = 8.0
"""Seconds that the execution of an interpreter may take, usually a millisecond. agentd waits for an answer longer."""
TEMPLATES_S = 8.0
"""Seconds that a template may take to end: robot workers get 2.75 s, and the processes that it kills 5 s."""
_MOST_TEXT = 500  # bytes
_CREDENTIALS = struct.Struct("3i")
_PR_SET_DUMPABLE = 4
_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, _CAPABILITY_VERSION = 47, 4, 0x20080522
_libc = ctypes.CDLL(None, use_errno=True)


class _Start:
    """A forked template that is about to execute its interpreter: *number* is that of agentd's order."""

    def __init__(self, pid: int, number: int) -> None:
        self.pid, self.number, self.due = pid, number, time.monotonic() + EXEC_S


class Keeper:
    """The keeper: starts templates for agentd, and kills the processes that ended templates leave. `run` is its main
    loop. If *stays* is true, the keeper goes on without an agentd and without children.
    """

    def __init__(self, listener: socket.socket, stays: bool = False) -> None:
        self._listener = listener
        self._stays = stays
        self._callers: dict[int, socket.socket] = {}
        self._waiting: set[socket.socket] = set()  # for the keeper's end
        self._agent: socket.socket | None = None
        self._keep = True
        self._ready: dict[int, bool] = {}  # templates, by pid
        self._starting: dict[int, _Start] = {}  # those whose program is not executed yet, by descriptor of its error
        self._spare_until = 0.0  # orphans; 0 when none are spared
        self._kill_templates_at = 0.0  # 0 for never
        self._stop_asked = False
        self._stopping = False
        self._poll = select.poll()
        self._wakeup, self._signals = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self) -> None:
        """Serve agentd, and return when the keeper has no child and no agentd is connected. If `stays` is true, return
        only after SIGTERM.
        """
        signal.set_wakeup_fd(self._signals, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN)
        self._listener.setblocking(False)
        self._accept()  # agentd connects before it starts us
        self._poll.register(self._listener, select.POLLIN)
        self._poll.register(self._wakeup, select.POLLIN)
        while True:
            if self._stop_asked and not self._stopping:
                self._stop()
            alone = self._tend_children()
            served = len(self._callers) > len(self._waiting)  # by an agentd, or by a process that may become one
            if alone and (self._stopping or not (self._stays or served)):
                return
            for fd, _ in self._poll.poll(self._patience_ms()):
                if fd == self._wakeup:
                    os.read(fd, 4096)
                elif fd == self._listener.fileno():
                    self._accept()
                elif fd in self._starting:
                    self._executed(fd)
                elif fd in self._callers:
                    self._receive_from(self._callers[fd])
            self._give_up_starts()

    def _patience_ms(self) -> float | None:
        due = [at for at in (self._spare_until, self._kill_templates_at) if at]
        due += [start.due for start in self._starting.values()]
        return max(0.0, min(due) - time.monotonic()) * 1000 if due else None  # poll rounds up

    def _on_sigterm(self, *_: object) -> None:
        self._stop_asked = True  # `run` acts on it: a handler may run between a waitpid and what follows from it

    def _stop(self) -> None:
        """Send SIGTERM to all templates, which then end their workers. Templates that still run after TEMPLATES_S are
        killed by the main loop.
        """
        self._stopping = True
        self._kill_templates_at = time.monotonic() + TEMPLATES_S
        for pid in self._ready:
            os.kill(pid, signal.SIGTERM)  # not reaped yet: it is ours still

    # --- processes ---

    def _tend_children(self) -> bool:
        """Reap ended children, and kill the orphans and templates whose grace is over. An orphan is a process that an
        ended template left. Return True if the keeper has no child.
        """
        if 0 < self._kill_templates_at <= time.monotonic():
            self._kill_templates_at = 0.0
            for pid in self._ready:
                os.kill(pid, signal.SIGKILL)
        found = children()
        while [pid for pid in found if self._reap(pid)]:
            found = children()  # the children of the dead are ours only now
        now = time.monotonic()
        # with this list of children: a later one may hold the robot workers of a template that has just died
        if now >= self._spare_until:
            orphans = [pid for pid in found if pid not in self._ready]
            if orphans and any(is_dying(pid) for pid in self._ready):  # the orphans may be its own
                self._spare_until = now + ORPHANS_S
            else:
                self._spare_until = 0.0
                for pid in orphans:
                    kill(pid)  # its own children become ours, and are next
        return not found

    def _reap(self, pid: int) -> bool:
        """If the child *pid* has ended, reap it and return True; otherwise return False. If the child was a template,
        or can have been a worker because it led a session, report its exit status to agentd.
        """
        if any(one.pid == pid for one in self._starting.values()):
            return False  # `_executed` does
        leads = session(pid) == pid
        ended, status = os.waitpid(pid, os.WNOHANG)
        if not ended:
            return False
        template = self._ready.pop(pid, None) is not None
        if template:
            self._spare_until = time.monotonic() + ORPHANS_S
        if template or leads:  # a worker, perhaps
            self._tell({"ended": pid, "status": status})
        return True

    def _start(self, order: dict[str, object], fds: list[int]) -> None:
        """Fork a template with the argv, env and user of *order* and the descriptors *fds*. `_executed` answers agentd.
        Raise OSError if the template cannot be forked.
        """
        argv, env, user, number = order["argv"], order["env"], order["user"], order["number"]
        assert isinstance(argv, list)
        assert isinstance(env, dict)
        assert user is None or isinstance(user, dict)
        assert isinstance(number, int)
        this = os.getpid()
        failed, tell = os.pipe2(os.O_CLOEXEC)
        try:
            pid = os.fork()
            if pid == 0:
                try:
                    become(this, fds, argv, env, user)
                except BaseException as error:  # noqa: BLE001 - agentd gets it
                    text = getattr(error, "strerror", None) or repr(error)
                    number = getattr(error, "errno", None) or errno.EINVAL
                    os.write(tell, struct.pack("i", number) + text.encode()[:_MOST_TEXT])
                finally:
                    os._exit(127)
        except OSError:
            os.close(failed)
            raise
        finally:
            os.close(tell)
        self._ready[pid] = False
        self._starting[failed] = _Start(pid, number)
        self._poll.register(failed, select.POLLIN)

    def _executed(self, failed: int) -> None:
        """Tell agentd that a template executes its interpreter, with pid, start and pidfd; or why it does not."""
        error = os.read(failed, 4 + _MOST_TEXT)  # nothing if the program is executed
        start = self._forget_start(failed)
        if error:
            os.waitpid(start.pid, 0)
            del self._ready[start.pid]
            said, text = struct.unpack_from("i", error)[0], error[4:].decode(errors="replace")
            self._tell({"errno": said, "text": text, "number": start.number})
            return
        try:
            pidfd = os.pidfd_open(start.pid)
            try:
                self._tell({"pid": start.pid, "began": began(start.pid), "number": start.number}, [pidfd])
            finally:
                os.close(pidfd)
        except OSError as why:
            os.kill(start.pid, signal.SIGKILL)
            self._tell({"errno": why.errno, "number": start.number})

    def _give_up_starts(self) -> None:
        """Kill the templates whose interpreter is not executed within EXEC_S, and tell agentd."""
        for failed, start in list(self._starting.items()):
            if start.due <= time.monotonic():
                self._forget_start(failed)
                os.kill(start.pid, signal.SIGKILL)
                text = f"its execution takes longer than {EXEC_S:g} s: its file system hangs, or a process has a lease"
                self._tell({"errno": errno.ETIMEDOUT, "text": text, "number": start.number})

    def _forget_start(self, failed: int) -> _Start:
        self._poll.unregister(failed)
        os.close(failed)
        return self._starting.pop(failed)

    # --- agentd ---

    def _accept(self) -> None:
        try:
            caller, _ = self._listener.accept()
        except OSError:
            return
        pid, uid, _ = _CREDENTIALS.unpack(caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if uid != os.getuid() or is_below(pid, os.getpid()):
            caller.close()
            return
        caller.setblocking(False)
        self._callers[caller.fileno()] = caller
        self._poll.register(caller, select.POLLIN)

    def _receive_from(self, caller: socket.socket) -> None:
        try:
            data, fds = receive(caller, 5)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        try:
            if not data:
                self._disconnect(caller)
            else:
                self._obey(caller, json.loads(data), fds)
        except (ValueError, LookupError, TypeError, AssertionError):  # not from our agentd, or without its descriptors
            self._disconnect(caller)
        finally:
            for fd in fds:
                os.close(fd)

    def _obey(self, caller: socket.socket, order: dict[str, object], fds: list[int]) -> None:
        what = order["do"]
        if what == "hello":
            if self._agent is not None:
                self._disconnect(self._agent)  # it has ended: the new one holds the run directory's lock
            self._agent, self._keep = caller, bool(order["keep"])
            if not self._stopping:
                self._kill_templates_at = 0.0
            self._tell({"keeper": os.getpid()})
        elif what == "wait":
            self._waiting.add(caller)
        elif caller is not self._agent:
            self._disconnect(caller)
        elif what == "start":
            with open(fds[0], "rb", closefd=False) as file:
                packet = json.loads(file.read())
            try:
                if self._stopping:
                    raise OSError(errno.ESHUTDOWN, os.strerror(errno.ESHUTDOWN))
                self._start(packet, fds[1:])
            except OSError as error:
                self._tell({"errno": error.errno, "number": packet["number"]})
        elif what == "ready":
            template = order["pid"]
            assert isinstance(template, int)
            if template in self._ready:
                self._ready[template] = True

    def _tell(self, answer: dict[str, object], fds: list[int] | None = None) -> None:
        if self._agent is None:
            return
        with contextlib.suppress(OSError):  # it has ended, or does not read; its own pidfds tell it of ends
            socket.send_fds(self._agent, [json.dumps(answer).encode()], fds or [])

    def _disconnect(self, caller: socket.socket) -> None:
        self._poll.unregister(caller)
        del self._callers[caller.fileno()]
        self._waiting.discard(caller)
        caller.close()
        if caller is not self._agent:
            return
        self._agent = None
        for failed in list(self._starting):  # the next agentd has orders with these numbers too
            self._forget_start(failed)
        for pid, ready in self._ready.items():
            if not ready:  # it may hang in an import, and would not notice agentd's end
                os.kill(pid, signal.SIGKILL)
        if not self._keep and not self._stopping:
            self._kill_templates_at = time.monotonic() + TEMPLATES_S


def drop(user: dict[str, object]) -> None:
    """Give up this process's user and capabilities for those of *user*, with no way back: uid, gid, groups, umask and
    resource limits. Raise OSError if that fails.

    The caller executes another program afterwards: until then the process is not dumpable.
    """
    uid, gid, umask, groups, limits = (user[name] for name in ("uid", "gid", "umask", "groups", "limits"))
    assert isinstance(uid, int)
    assert isinstance(gid, int)
    assert isinstance(umask, int)
    assert isinstance(groups, list)
    assert isinstance(limits, dict)
    for name, value in limits.items():
        try:
            resource.setrlimit(getattr(resource, f"RLIMIT_{name.upper()}"), (value, value))
        except (ValueError, OverflowError) as error:
            raise PermissionError(errno.EPERM, f"limits in [workers] has {name} = {value}: {error}") from None
    os.umask(umask)
    os.setgroups(groups)
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    # a process that is not root keeps its capabilities when it changes its user
    _libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    if _libc.capset(header, (ctypes.c_uint32 * 6)()) != 0:
        raise OSError(ctypes.get_errno(), "capset")
    if os.getresuid() != (uid, uid, uid) or os.getresgid() != (gid, gid, gid):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))


def become(
    parent: int, fds: list[int], argv: list[str], env: dict[str, str], user: dict[str, object] | None = None
) -> None:
    """Turn this process, a fresh fork of the keeper with pid *parent*, into a template by execve. Raise OSError if that
    fails.

    *fds* are the socket to agentd, the file for stdout and stderr, and then further ones, such as the pidfd of the
    driver that owns agentd. *user* is what `drop` needs, None for the keeper's own user.

    The process asks the kernel to kill it when the keeper ends, because a template does not notice the end of agentd
    during its imports. After the imports the template cancels this.
    """
    os.setsid()
    if user is not None:
        drop(user)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # a change of the user would clear it
    if os.getppid() != parent:
        os._exit(1)
    signal.set_wakeup_fd(-1)
    for handled in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(handled, signal.SIG_DFL)
    null = os.open("/dev/null", os.O_RDONLY)
    # numbers above those that dup2 fills
    taken = [os.dup(fd) for fd in (null, fds[1], fds[1], fds[0], *fds[2:])]
    while min(taken) < len(taken):
        taken = [os.dup(fd) for fd in taken]
    for number, fd in enumerate(taken):
        os.dup2(fd, number)
    os.chdir("/")
    os.execve(argv[0], argv, env)


def run_as(order: int, argv: list[str]) -> None:
    """Execute the program *argv* as another user. The file *order* has what `drop` needs, and the environment.

    agentd waits for the execution of what it starts. So it starts this file, which no user can hold up.
    """
    with open(order, "rb") as file:
        packet = json.load(file)
    drop(packet["user"])
    os.execve(argv[0], argv, packet["env"])


def receive(sock: socket.socket, most: int) -> tuple[bytes, list[int]]:
    """Receive one packet from *sock*. Return its data (b"" at the end of the connection), and its file descriptors, of
    which there are at most *most*. The descriptors are closed on exec.

    Raise OSError if no packet waits, or if the connection is broken.
    """
    data, fds, _, _ = socket.recv_fds(sock, MAX_PACKET, most)  # recv_fds ignores its flags (CPython 3.10 to 3.13)
    for fd in fds:
        os.set_inheritable(fd, False)
    return data, fds


def began(pid: int) -> int:
    """Return the start time of the process *pid*, in clock ticks since boot. The process is a child that is
    not reaped.
    """
    return int(stat(pid)[19])


def is_dying(pid: int) -> bool:
    """Return True if the main thread of a child that is not reaped yet has ended. Its other threads may still be
    ending.
    """
    return stat(pid)[0] in (b"Z", b"X")


def stat(pid: int) -> list[bytes]:
    """Return the fields of /proc/PID/stat, without the first two (pid and name). So the first field returned is the
    state of the process.
    """
    with open(f"/proc/{pid}/stat", "rb") as file:
        text = file.read()
    return text[text.rindex(b")") + 2 :].split()


def is_below(pid: int, ancestor: int) -> bool:
    """Return True if the process *pid* is a descendant of the process *ancestor*, or has ended."""
    while pid not in (0, 1, ancestor):
        try:
            pid = int(stat(pid)[1])
        except OSError:
            return True
    return pid == ancestor != 1


def children() -> list[int]:
    """Return the pids of this process's children, including zombies. Children that other threads than the main thread
    started may be missing; the keeper has no other thread.
    """
    pid, found = os.getpid(), list[int]()
    try:
        with open(f"/proc/{pid}/task/{pid}/children", "rb") as file:
            return [int(word) for word in file.read().split()]
    except FileNotFoundError:  # a kernel without PROC_CHILDREN
        pass
    for name in os.listdir("/proc"):
        try:
            parent = int(stat(int(name))[1])
        except (OSError, ValueError):
            continue
        if parent == pid:
            found.append(int(name))
    return found


def session(pid: int) -> int:
    """Return the session id of a process, or 0 if the process does not exist."""
    try:
        return os.getsid(pid)
    except OSError:
        return 0


def kill(pid: int) -> None:
    """Send SIGKILL to the child *pid*. The pid cannot be another process's, because the keeper has not reaped the
    child.
    """
    with contextlib.suppress(PermissionError):  # it has become another user
        os.kill(pid, signal.SIGKILL)


def main() -> None:
    if sys.argv[1] == "as":
        run_as(int(sys.argv[2]), sys.argv[3:])
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # orders have the environments of all jobs; templates are dumpable again
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    _libc.prctl(_PR_SET_NAME, ctypes.create_string_buffer(b"rlinf-keeper"), 0, 0, 0)
    os.set_inheritable(int(sys.argv[1]), False)
    listener = socket.socket(fileno=int(sys.argv[1]))
    manager = os.environ.get("NOTIFY_SOCKET", "")
    if manager:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
            notify.sendto(b"READY=1\nSTATUS=listens for agentd", "\0" + manager[1:] if manager[0] == "@" else manager)
    Keeper(listener, "stay" in sys.argv).run()


if __name__ == "__main__":
    main()
