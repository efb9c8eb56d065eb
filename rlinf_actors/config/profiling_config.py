"""ProfileConfig and its subclasses: the ``cluster.profiling`` section, one class for each profiler.

The classes check the keys and write the command that goes before the interpreter of a profiled worker. They start
nothing: agentd runs the command, after it has found the program on its node (agentd.launch_plan).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rlinf_actors.config.config_values import build
from rlinf_actors.config_files import check_variables
from rlinf_actors.conversion import nearest
from rlinf_actors.errors import ConfigError
from rlinf_actors.model.profiler import OUTPUT, OUTPUT_DIR, OUTPUT_NAME, Profiler

ALL_GROUPS = "all"


@dataclass
class ProfileConfig:
    """The ``profiling`` section of a cluster's configuration, with the keys that all profilers have.

    Attributes:
        backend: name of the profiler: nsight, rocprof_sys or torch.
        enabled: False turns the section off.
        worker_groups: names of the groups to profile, in any case; ``all`` for every group, None for no group.
        ranks: ranks of these groups to profile; None for all ranks.
        steps: numbers of the training steps to profile; None for all steps.
        output_dir: directory of the profiler's files on each node; None for the directory of the worker's log files.
    """

    BACKEND_TYPE: ClassVar[str] = ""

    backend: str = ""
    enabled: bool = True
    worker_groups: list[str] | str | None = None
    steps: list[int] | None = None
    output_dir: str | None = None
    ranks: list[int] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.worker_groups, str):
            self.worker_groups = [self.worker_groups]
        elif self.worker_groups is not None:
            self.worker_groups = _texts(self.worker_groups, "worker_groups")
        if self.steps is not None:
            self.steps = _numbers(self.steps, "steps", "Profiling steps")
        if self.ranks is not None:
            self.ranks = _numbers(self.ranks, "ranks", "Profiling ranks")

    def profiles_worker_group(self, worker_group_name: str) -> bool:
        """Return True if the workers of this group are profiled."""
        if not self.enabled or not self.worker_groups:
            return False
        names = {name.lower() for name in self.worker_groups}
        return ALL_GROUPS in names or worker_group_name.lower() in names

    def profiles_worker(self, worker_group_name: str, rank: int) -> bool:
        """Return True if this rank of this group is profiled."""
        return self.profiles_worker_group(worker_group_name) and (self.ranks is None or rank in self.ranks)

    def should_profile_step(self, step_idx: int) -> bool:
        """Return True if the training step with this number is profiled."""
        return self.enabled and (self.steps is None or step_idx in self.steps)

    def command(self) -> list[str]:
        """Return the command that goes before the interpreter of a profiled worker; empty if there is none.

        Its first entry is the name of the program, which agentd must allow.
        """
        return []

    def environment(self) -> dict[str, str]:
        """Return variables that the profiler needs in the environment of a profiled worker."""
        return {}

    def profiler(self) -> Profiler | None:
        """Return the program under which the profiled workers are started, None if there is none."""
        command = self.command()
        return Profiler(command, self.environment(), self.output_dir or "") if command else None

    def check(self) -> bool:
        """Return True if the profiler's program is on the PATH of this process."""
        program = next(iter(self.command()), None)
        return program is None or _on_path(program)


@dataclass
class NsightConfig(ProfileConfig):
    """The ``profiling`` section for NVIDIA Nsight Systems, ``nsys profile``.

    Attributes:
        options: options with values, by name without dashes: ``{t: "cuda,nvtx"}``. ``stop-on-range-end: true`` is
            written as ``capture-range-end: stop``.
        flags: options without values.
    """

    BACKEND_TYPE: ClassVar[str] = "nsight"

    backend: str = "nsight"
    options: dict[str, Any] | None = None
    flags: list[str] | str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.flags is not None:
            self.flags = [self.flags] if isinstance(self.flags, str) else _texts(self.flags, "flags")
            if "" in self.flags:
                raise ConfigError("Nsight flags must not be empty", path="flags")
        if self.options is not None:
            self.options = _mapping(self.options, "Nsight options", "options")
            self._use_capture_range_end(self.options)
            if "o" in self.options and "output" in self.options:
                raise ConfigError("Nsight options must not specify both 'o' and 'output'", path="options")
        if self.steps is not None:  # without these nsys ignores start_profile and records the whole life of the worker
            self.options = {"capture-range": "cudaProfilerApi", "capture-range-end": "stop", **(self.options or {})}
        both = sorted({*(self.flags or ())} & {*(self.options or ())})
        if both:
            raise ConfigError(f"Nsight flags and options must not specify the same names: {', '.join(both)}")

    @staticmethod
    def _use_capture_range_end(options: dict[str, str]) -> None:
        """Replace the option stop-on-range-end, which nsys no longer has, by capture-range-end."""
        if "stop-on-range-end" not in options:
            return
        if "capture-range-end" in options:
            text = "Nsight options must not specify both 'stop-on-range-end' and 'capture-range-end'"
            raise ConfigError(text, path="options")
        value = options.pop("stop-on-range-end")
        words = {
            **dict.fromkeys(("true", "1", "yes", "on"), "stop"),
            **dict.fromkeys(("false", "0", "no", "off"), "none"),
        }
        options["capture-range-end"] = words.get(value.strip().lower(), value)

    def to_cli_tokens(self, default_output_prefix: str | None = None) -> list[str]:
        """Return the options as arguments of ``nsys profile``.

        *default_output_prefix* is the path of the report without suffix, unless the options have one.
        """
        options = dict(self.options or {})
        if default_output_prefix is not None and "output" not in options:
            options.setdefault("o", default_output_prefix)
        flags = [f"--{flag}" if len(flag) > 1 else f"-{flag}" for flag in self.flags or ()]
        return [*flags, *_tokens(options)]

    def command(self) -> list[str]:
        return ["nsys", "profile", *self.to_cli_tokens(OUTPUT)]


@dataclass
class RocprofSysConfig(ProfileConfig):
    """The ``profiling`` section for AMD's ROCm Systems Profiler, ``rocprof-sys-python``.

    Attributes:
        args: options with values, by name without dashes.
        env: environment variables of the profiled workers; they win over those that say where the files go.
    """

    BACKEND_TYPE: ClassVar[str] = "rocprof_sys"

    backend: str = "rocprof_sys"
    args: dict[str, Any] | None = None
    env: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.args is not None:
            self.args = _mapping(self.args, "RocprofSys args", "args")
        if self.env is not None:
            self.env = _mapping(self.env, "RocprofSys env", "env")
            check_variables(self.env, "env")

    def to_cli_tokens(self) -> list[str]:
        """Return the command with its options, up to the ``--`` before the interpreter."""
        return ["rocprof-sys-python", *_tokens(self.args or {}), "--"]

    def command(self) -> list[str]:
        return self.to_cli_tokens()

    def environment(self) -> dict[str, str]:
        return self.variables(OUTPUT_DIR, OUTPUT_NAME)

    def variables(self, directory: str, name: str) -> dict[str, str]:
        """Return the variables of a worker whose files go to *directory* and have names that begin with *name*."""
        return {
            "ROCPROFSYS_TIME_OUTPUT": "false",
            "ROCPROFSYS_OUTPUT_PATH": directory,
            "ROCPROFSYS_OUTPUT_PREFIX": name,
            **(self.env or {}),
        }


@dataclass
class TorchProfileConfig(ProfileConfig):
    """The ``profiling`` section for torch.profiler, which runs inside the worker and needs no program of the node.

    Attributes:
        record_shapes, profile_memory, with_stack: arguments of ``torch.profiler.profile``.
    """

    BACKEND_TYPE: ClassVar[str] = "torch"

    backend: str = "torch"
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False


BACKENDS: dict[str, type[ProfileConfig]] = {
    cls.BACKEND_TYPE: cls for cls in (NsightConfig, RocprofSysConfig, TorchProfileConfig)
}


def parse_profiling(values: Mapping[Any, Any], path: str) -> ProfileConfig:
    """Return the ``profiling`` section *values* as an instance of its backend's class. *path* is its config path.

    Raises:
        ConfigError: the backend is missing or unknown, or a key or value is wrong.
    """
    backend = str(values.get("backend") or "")
    known = ", ".join(BACKENDS)
    if not backend:
        raise ConfigError(f"backend must be specified: it names the profiler, one of {known}", path=f"{path}.backend")
    if backend not in BACKENDS:
        hint = f"did you mean {nearest(backend, BACKENDS)!r}? "
        text = f"Unknown profiling backend {backend!r}; {hint}Known backends: {known}"
        raise ConfigError(text, path=f"{path}.backend")
    config: ProfileConfig = build(BACKENDS[backend], values, path)
    return config


def _texts(value: Any, name: str) -> list[str]:
    if isinstance(value, (str, Mapping)) or not isinstance(value, Sequence):
        raise ConfigError(f"{name} must be a list of strings or a single string, and is {value!r}", path=name)
    return [str(item) for item in value]


def _numbers(value: Any, name: str, title: str) -> list[int]:
    if isinstance(value, (str, Mapping)) or not isinstance(value, Sequence):
        raise ConfigError(f"{name} must be a list of ints, and is {value!r}", path=name)
    numbers = [int(number) for number in value]
    if min(numbers, default=0) < 0:
        raise ConfigError(f"{title} must be non-negative ints, and are {numbers}", path=name)
    return numbers


def _mapping(value: Any, title: str, name: str) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{title} must be a dictionary, and is {value!r}", path=name)
    if "" in value:
        raise ConfigError(f"{title} must not have an empty name", path=name)
    return {str(key): str(item).lower() if isinstance(item, bool) else str(item) for key, item in value.items()}


def _tokens(options: Mapping[str, str]) -> list[str]:
    tokens: list[str] = []
    for name, value in options.items():
        tokens += [f"--{name}={value}"] if len(name) > 1 else [f"-{name}", value]
    return tokens


def _on_path(program: str) -> bool:
    import shutil

    return shutil.which(os.path.expanduser(program)) is not None
