"""Environments that this node has built: a virtual environment for each hash of requirements. Any thread; blocks.

An environment shows the packages of the interpreter that it was made from, after its own. So the needs of rlinf_actors
are there without an index, and requirements add to what is installed. It is built at its final place, because the
programs in a virtual environment hold its path; the file COMPLETE is written last. PATH.lock is held shared by each
process that uses the environment, exclusively by the one that builds it, so a hash is built once, however many ask.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import msgspec

from rlinf_actors.codesync import locks, pip_settings
from rlinf_actors.codesync.code_store import remove_tree
from rlinf_actors.codesync.places import Places
from rlinf_actors.codesync.requirements import Requirements
from rlinf_actors.errors import RlinfActorsError

log = logging.getLogger(__name__)

COMPLETE = "rlinf-actors.json"
BUILD_S = 3600.0
"""Seconds after which a build is ended as a failure."""
TAIL = 40
"""Most lines of a failed build's output that its error has."""
_HIDDEN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PIP_TARGET", "PIP_PREFIX", "PIP_USER", "PIP_REQUIRE_VIRTUALENV")
"""Variables that would make pip or uv look at or install into another place than the new environment."""


class EnvironmentBuildError(RlinfActorsError):
    """An environment could not be built on a node. The text ends with the last lines of pip's or uv's output."""


class Base(msgspec.Struct, frozen=True):
    """The interpreter that an environment is made from.

    Attributes:
        interpreter: its path.
        version: its full version, as sys.version.
        site: its directories of installed packages, in their order on sys.path.
        prefix: its sys.prefix.
        pip: True if it has pip.
    """

    interpreter: str
    version: str
    site: tuple[str, ...]
    prefix: str
    pip: bool

    @classmethod
    def own(cls) -> Base:
        """Return the interpreter of this process."""
        site = [path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")]
        has_pip = importlib.util.find_spec("pip") is not None
        return cls(sys.executable, sys.version, tuple(dict.fromkeys(site)), sys.prefix, has_pip)


class Recipe(msgspec.Struct, frozen=True):
    """All that decides the content of an environment.

    Attributes:
        uv: path of uv, "" to use pip.
        environ: the environment of the build.
        index: the settings of package indexes on this machine.
    """

    requirements: Requirements
    base: Base
    uv: str
    environ: Mapping[str, str]
    index: pip_settings.IndexSettings

    @classmethod
    def of(cls, requirements: Requirements, environ: Mapping[str, str], base: Base) -> Recipe:
        """Return the recipe of *requirements* on top of *base*, built in *environ*. Looks for uv, reads settings."""
        env = {name: value for name, value in environ.items() if name not in _HIDDEN}
        places = [env.get("PATH", os.defpath), os.path.dirname(base.interpreter)]
        if env.get("HOME"):
            places.append(os.path.join(env["HOME"], ".local", "bin"))
        uv = shutil.which("uv", path=os.pathsep.join(places)) or ""
        return cls(requirements, base, uv, env, pip_settings.read(env, base.prefix))

    @property
    def name(self) -> str:
        """The hash by which the environment is kept."""
        base = self.base
        said = [
            list(self.requirements.lines), list(self.requirements.constraints), os.path.realpath(base.interpreter),
            base.interpreter, base.version, list(base.site), bool(self.uv), self.index.fingerprint,
        ]  # fmt: skip
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:32]


class Environment(msgspec.Struct):
    """An environment that this process uses; no process removes it before `release`.

    Attributes:
        interpreter: path of its Python.
        built: True if this call has built it.
    """

    interpreter: str
    lock: locks.Lock
    built: bool = False

    def release(self) -> None:
        """Let other processes remove the environment."""
        self.lock.release()


class Build(msgspec.Struct):
    """One build; `cancel` ends it from another thread.

    Attributes:
        say: called with each line of output, on the thread that builds.
    """

    say: Callable[[str], object]
    tail: deque[str] = msgspec.field(default_factory=lambda: deque(maxlen=TAIL))
    _process: subprocess.Popen[str] | None = None
    _ended: str = ""
    _lock: threading.Lock = msgspec.field(default_factory=threading.Lock)

    def cancel(self, why: str = "it was cancelled") -> None:
        """End the build as a failure for the reason *why*: kill pip or uv with what they started. Any thread."""
        with self._lock:
            self._ended = self._ended or why
            if self._process is not None and self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)

    def run(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """Run *command* and pass on its output. Raise EnvironmentBuildError if it fails or the build is cancelled."""
        shown = " ".join(command)
        self.say(f"$ {shown}")
        with self._lock:
            if self._ended:
                raise EnvironmentBuildError(self._ended)
            self._process = subprocess.Popen(
                command, env=dict(environ), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                text=True, errors="replace", start_new_session=True,
            )  # fmt: skip
        process = self._process
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                self.tail.append(line.rstrip())
                self.say(line.rstrip())
        code = process.wait()
        if self._ended or code:
            why = self._ended or f"'{shown}' ended with code {code}"
            raise EnvironmentBuildError("\n".join([why, *self.tail]))


class EnvironmentStore:
    """The environments below one directory. Several processes may use it at once."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self.directory = places.environments

    def acquire(self, recipe: Recipe, build: Build) -> Environment:
        """Return the environment of *recipe*, and build it if the node does not have it.

        Blocks while another process builds the same one. Raise EnvironmentBuildError if the build fails; nothing of it
        is left then.
        """
        self._places.make(self.directory)
        entry = os.path.join(self.directory, recipe.name)
        interpreter = os.path.join(entry, "bin", "python")
        lock = self._hold(entry)
        if lock is None:
            turn = locks.take_turn(entry)
            try:
                lock = self._hold(entry)
                if lock is None:
                    return Environment(interpreter, self._make(entry, recipe, build), built=True)
            finally:
                turn.remove()
                turn.release()
        lock.touch()
        return Environment(interpreter, lock)

    def _hold(self, entry: str) -> locks.Lock | None:
        """Lock *entry* shared if it is complete. Blocks while another process builds it."""
        lock = locks.hold(entry)
        assert lock is not None
        if self._is_complete(entry):
            return lock
        lock.release()
        return None

    def _make(self, entry: str, recipe: Recipe, build: Build) -> locks.Lock:
        while True:
            lock = locks.take(entry)
            assert lock is not None
            try:
                self._build(entry, recipe, build)
                lock.touch()
                if lock.share():
                    return lock
            except BaseException:
                remove_tree(entry)
                lock.remove()
                lock.release()
                raise
            lock.release()

    @staticmethod
    def _is_complete(entry: str) -> bool:
        return os.path.exists(os.path.join(entry, COMPLETE))

    def _build(self, entry: str, recipe: Recipe, build: Build) -> None:
        remove_tree(entry)  # of a builder that was killed
        base, env = recipe.base, recipe.environ
        python = os.path.join(entry, "bin", "python")
        timer = threading.Timer(BUILD_S, build.cancel, [f"it took longer than {BUILD_S:g} s"])
        timer.daemon = True
        timer.start()
        try:
            if recipe.uv:
                build.run([recipe.uv, "venv", "--no-project", "--python", base.interpreter, entry], env)
            else:
                build.run([base.interpreter, "-m", "venv", *["--without-pip"] * base.pip, entry], env)
            _show_base(entry, base)
            files = _write_files(entry, recipe.requirements)
            if recipe.uv:
                more = recipe.index.for_uv(env)
                build.run([recipe.uv, "pip", "install", "--python", python, *more, *files], env)
            else:
                flags = ["--no-input", "--disable-pip-version-check", "--no-warn-script-location"]
                build.run([python, "-m", "pip", "install", *flags, *files], {**env, **recipe.index.for_pip(env)})
        except OSError as error:
            raise EnvironmentBuildError(f"{entry} cannot be made: {error}") from None
        finally:
            timer.cancel()
        with open(os.path.join(entry, COMPLETE), "w", encoding="utf-8") as file:
            json.dump({"requirements": recipe.requirements.lines, "interpreter": base.interpreter}, file)

    def trim(self) -> list[str]:
        """Remove unused environments beyond the bound, the longest unused first, and what killed builds left.

        Return the names of the removed ones.
        """
        names = [name for name in os.listdir(self.directory) if not name.endswith(locks.SUFFIX)]
        names.sort(key=lambda name: locks.last_used(os.path.join(self.directory, name)))
        kept = self._places.settings.environments_kept
        removed: list[str] = []
        for name in names:
            entry = os.path.join(self.directory, name)
            if len(names) - len(removed) <= kept and self._is_complete(entry):
                continue
            lock = locks.take(entry, wait=False)
            if lock is None:
                continue
            remove_tree(entry)
            lock.remove()
            lock.release()
            removed.append(name)
        return removed


def _show_base(entry: str, base: Base) -> None:
    """Make the packages of *base* importable in the environment *entry*, after those of the environment itself."""
    version = ".".join(map(str, sys.version_info[:2]))
    site = os.path.join(entry, "lib", f"python{version}", "site-packages")
    os.makedirs(site, exist_ok=True)
    with open(os.path.join(site, "rlinf-actors-base.pth"), "w", encoding="utf-8") as file:
        file.writelines(f"import site; site.addsitedir({directory!r})\n" for directory in base.site)


def _write_files(entry: str, requirements: Requirements) -> list[str]:
    """Write requirements and constraints as files, and return the options that name them."""
    options = []
    for flag, name, lines in (
        ("-r", "requirements.txt", requirements.lines), ("-c", "constraints.txt", requirements.constraints)
    ):  # fmt: skip
        if lines:
            path = os.path.join(entry, name)
            with open(path, "w", encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in lines)
            options += [flag, path]
    return options
