"""The names of RLinf's Cluster class that need no cluster: its variables, and how path variables are merged.

Cluster derives from `ClusterNames`, so programs use them as ``Cluster.get_full_env_var_name(...)``. Any thread.
"""

from __future__ import annotations

import enum
import os
import shlex
import tempfile
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from rlinf_actors.errors import RlinfActorsError
from rlinf_actors.model.address import WorkerAddress
from rlinf_actors.model.placement import PATH_LIKE, merge_paths
from rlinf_actors.net.host import free_port

if TYPE_CHECKING:
    from rlinf_actors.config.profiling_config import ProfileConfig


class ClusterEnvVar(str, enum.Enum):
    """The variables of RLinf that a cluster and its workers read, without the prefix ``RLINF_``."""

    CATCH_FAILURE = "CATCH_FAILURE"
    LOG_LEVEL = "LOG_LEVEL"
    TIMEOUT = "TIMEOUT"
    NODE_RANK = "NODE_RANK"
    COMM_NET_DEVICES = "COMM_NET_DEVICES"
    EXT_MODULE = "EXT_MODULE"
    NET_EMULATION = "NET_EMULATION"
    PATH_ENV_MERGE_MODE = "PATH_ENV_MERGE_MODE"
    CODE_WORKING_DIR = "CODE_WORKING_DIR"


class PathEnvMergeMode(str, enum.Enum):
    """Rule by which path variables, such as PYTHONPATH, of the configuration and of the node are merged."""

    APPEND = "append"
    """The configuration's directories, then those of the node that are not among them."""
    OVERRIDE = "override"
    """The configuration's directories only."""


class _ClusterType(type):
    """The class of Cluster. RLinf's programs look at ``Cluster._instance`` and delete it, to start another Cluster."""

    @property
    def _instance(cls) -> Any:
        current = cls._live()  # type: ignore[attr-defined]
        if current is None:
            raise AttributeError(f"no Cluster is running in this process, so {cls.__name__}._instance is not set")
        return current

    @_instance.deleter
    def _instance(cls) -> None:
        cls._instance.shutdown()


class ClusterNames(metaclass=_ClusterType):
    """The members of Cluster that need no running cluster.

    Attributes:
        SYS_NAME: name of the system, from which variables get their prefix.
        NAMESPACE: RLinf's name for all its jobs. The namespace of this job is ``cluster.namespace``.
        TIMEOUT_WARN_TIME: milliseconds; only for programs that read it.
        DEFAULT_SYS_ENV_VAR: RLinf's default of each variable; None if it has none.
        PATH_LIKE_ENV_VARS: the variables that contain a list of directories.
    """

    SYS_NAME: ClassVar[str] = "RLinf"
    NAMESPACE: ClassVar[str] = SYS_NAME
    TIMEOUT_WARN_TIME: ClassVar[int] = 3_600_000
    DEFAULT_SYS_ENV_VAR: ClassVar[Mapping[ClusterEnvVar, str | None]] = MappingProxyType(
        {
            ClusterEnvVar.CATCH_FAILURE: "0",
            ClusterEnvVar.LOG_LEVEL: "INFO",
            ClusterEnvVar.TIMEOUT: "180",
            ClusterEnvVar.NODE_RANK: None,
            ClusterEnvVar.COMM_NET_DEVICES: None,
            ClusterEnvVar.EXT_MODULE: None,
            ClusterEnvVar.NET_EMULATION: "0",
            ClusterEnvVar.PATH_ENV_MERGE_MODE: PathEnvMergeMode.APPEND.value,
            ClusterEnvVar.CODE_WORKING_DIR: "0",
        }
    )
    PATH_LIKE_ENV_VARS: ClassVar[frozenset[str]] = PATH_LIKE

    class NamespaceConflictError(RlinfActorsError):
        """Never raised: each driver has a namespace of its own. Programs may name the class in an ``except``."""

    @property
    def _num_nodes(self) -> int:
        """The number of nodes, under the name of the attribute of RLinf's Cluster."""
        nodes: int = self.num_nodes  # type: ignore[attr-defined]
        return nodes

    @classmethod
    def get_full_env_var_name(cls, var: ClusterEnvVar) -> str:
        """Return the name of a variable in the environment: ``RLINF_LOG_LEVEL`` for LOG_LEVEL."""
        return f"{cls.SYS_NAME.upper()}_{var.value}"

    @classmethod
    def get_sys_env_var(cls, env_var: ClusterEnvVar, default: str | None = None) -> str | None:
        """Return the value of a variable in the environment of this process, *default* if it is not set."""
        return os.environ.get(cls.get_full_env_var_name(env_var), default)

    @classmethod
    def get_path_env_merge_mode(cls, env_vars: Mapping[str, str]) -> PathEnvMergeMode:
        """Return the merge mode that RLINF_PATH_ENV_MERGE_MODE in *env_vars* names; APPEND if it is not set.

        Raises:
            ValueError: the variable names no mode.
        """
        name = cls.get_full_env_var_name(ClusterEnvVar.PATH_ENV_MERGE_MODE)
        value = str(env_vars.get(name, PathEnvMergeMode.APPEND.value)).lower()
        try:
            return PathEnvMergeMode(value)
        except ValueError:
            modes = " or ".join(mode.value for mode in PathEnvMergeMode)
            raise ValueError(f"{name} is {value!r}; it must be {modes}") from None

    @classmethod
    def merge_worker_env_vars(
        cls, base_env_vars: Mapping[str, str], incoming_env_vars: Mapping[str, str], mode: PathEnvMergeMode
    ) -> dict[str, str]:
        """Return the variables of a worker: *base_env_vars*, overridden by *incoming_env_vars*.

        With APPEND, the directories of a path variable in *incoming_env_vars* come before those in *base_env_vars*.
        """
        return merge_paths(base_env_vars, incoming_env_vars, PathEnvMergeMode(mode).value)

    @staticmethod
    def _merge_path_like_env_value(env_var_name: str, existing_value: str, incoming_value: str) -> str:
        return merge_paths({env_var_name: existing_value}, {env_var_name: incoming_value})[env_var_name]

    @staticmethod
    def find_free_port(max_port_num: int | None = None) -> int:
        """Return a free TCP port of this machine, below *max_port_num* if that is given.

        The port is not reserved, so another process may take it. In a worker, `Worker.acquire_free_port` reserves one.
        """
        return free_port(max_port_num)

    @staticmethod
    def modify_profile_context(
        python_interpreter_path: str, worker_name: str, profiling_cfg: ProfileConfig | None
    ) -> str:
        """Return the command line that runs *python_interpreter_path* under a profiler, quoted for a shell.

        This is for programs that start processes themselves. Workers are profiled by ``cluster.profiling``.

        Args:
            python_interpreter_path: the interpreter.
            worker_name: name of the worker, such as ``actor:0``, from which the files get their names.
            profiling_cfg: the ``profiling`` section; None for no profiler.

        Returns:
            The command line; *python_interpreter_path* unchanged if the worker's group is not profiled.
        """
        from rlinf_actors.config.profiling_config import NsightConfig, RocprofSysConfig

        found = _profiled(worker_name, profiling_cfg)
        if isinstance(found, NsightConfig):
            command = ["nsys", "profile", *found.to_cli_tokens(_output(worker_name, found)), python_interpreter_path]
        elif isinstance(found, RocprofSysConfig):
            command = [*found.to_cli_tokens(), python_interpreter_path]
        else:
            return python_interpreter_path
        return shlex.join(command)

    @staticmethod
    def get_profiling_env_vars_for_worker(worker_name: str, profiling_cfg: ProfileConfig | None) -> dict[str, str]:
        """Return the variables that the profiler of a worker needs; empty if the worker's group is not profiled."""
        from rlinf_actors.config.profiling_config import RocprofSysConfig

        found = _profiled(worker_name, profiling_cfg)
        if not isinstance(found, RocprofSysConfig):
            return {}
        directory, name = os.path.split(_output(worker_name, found))
        return found.variables(directory, name)


def _profiled(worker_name: str, config: ProfileConfig | None) -> ProfileConfig | None:
    group = WorkerAddress.from_name(worker_name).root_group_name
    return config if config is not None and config.profiles_worker_group(group) else None


def _output(worker_name: str, config: ProfileConfig) -> str:
    """Return the path of the report of a worker, without suffix, and make its directory."""
    directory = config.output_dir or tempfile.gettempdir()
    os.makedirs(directory, exist_ok=True)
    safe = "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in worker_name)
    return os.path.join(directory, f"rlinf_profile_{safe}_%p")
