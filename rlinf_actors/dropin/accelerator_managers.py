"""RLinf's classes of accelerator vendors, one for each type, as names for `AcceleratorUtil` and the accelerator table.

The class of NVIDIA is in rlinf_actors.dropin.nvidia_gpu.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, TypeVar

from rlinf_actors.config.profiling_config import BACKENDS, ProfileConfig, RocprofSysConfig
from rlinf_actors.hardware.accelerators import Accelerator, AcceleratorUtil
from rlinf_actors.model.hardware import AcceleratorType, HardwareInfo

_Manager = TypeVar("_Manager", bound="type[AcceleratorManager]")
_Profile = TypeVar("_Profile", bound="type[ProfileConfig]")


class AcceleratorManager:
    """Facts about one type of accelerator, and the profiler of that type. All methods belong to the class.

    Attributes:
        KIND: the type.
        manager_register: the class of each type.
        profiling_config_register: the class of the ``profiling`` section for each type that has a profiler.
        profile_backend_register: the same by the profiler's name.
    """

    KIND: ClassVar[AcceleratorType] = AcceleratorType.NO_ACCEL
    manager_register: ClassVar[dict[AcceleratorType, type[AcceleratorManager]]] = {}
    profiling_config_register: ClassVar[dict[AcceleratorType, type[ProfileConfig]]] = {
        AcceleratorType.AMD_GPU: RocprofSysConfig
    }
    profile_backend_register: ClassVar[dict[str, type[ProfileConfig]]] = BACKENDS

    @staticmethod
    def register_manager(accelerator_type: AcceleratorType) -> Callable[[_Manager], _Manager]:
        """Return a decorator that registers the class of a type."""

        def register(manager: _Manager) -> _Manager:
            manager.KIND = accelerator_type
            AcceleratorManager.manager_register[accelerator_type] = manager
            return manager

        return register

    @staticmethod
    def register_profiling_config(accelerator_type: AcceleratorType) -> Callable[[_Profile], _Profile]:
        """Return a decorator that registers the class of the ``profiling`` section for a type."""

        def register(config: _Profile) -> _Profile:
            AcceleratorManager.profiling_config_register[accelerator_type] = config
            if config.BACKEND_TYPE:
                AcceleratorManager.profile_backend_register[config.BACKEND_TYPE] = config
            return config

        return register

    @classmethod
    def _found(cls) -> Sequence[HardwareInfo]:
        resource = Accelerator.enumerate(0)
        return [info for info in resource.infos if info.type == cls.KIND.value] if resource is not None else []

    @classmethod
    def get_num_devices(cls) -> int:
        """Return the number of devices on this machine. Blocks while the vendor's library is asked."""
        return len(cls._found())

    @classmethod
    def get_accelerator_type(cls) -> AcceleratorType:
        """Return the type."""
        return cls.KIND

    @classmethod
    def get_accelerator_model(cls) -> str:
        """Return the model of the first device of this machine, UNKNOWN without one. Blocks."""
        return next((info.model for info in cls._found()), "UNKNOWN")

    @classmethod
    def get_accelerator_env_var(cls, visible_accelerators: list[str]) -> dict[str, str]:
        """Return the variables of a process that sees only *visible_accelerators*."""
        return AcceleratorUtil.get_accelerator_env_var(cls.KIND, visible_accelerators)

    @classmethod
    def get_visible_devices(cls) -> list[int | str]:
        """Return the devices that the visibility variable of this process lists; [] if it is not set."""
        return AcceleratorUtil.get_visible_devices(cls.KIND) or []

    @classmethod
    def get_ccl_backend(cls) -> str:
        """Return the name of the type's backend in torch.distributed."""
        return AcceleratorUtil.get_ccl_backend(cls.KIND)

    @classmethod
    def get_ccl_socket_ifname_env_var(cls) -> str:
        """Return the variable that chooses the network interface of that backend."""
        return AcceleratorUtil.get_ccl_socket_ifname_env_var(cls.KIND)

    @classmethod
    def get_torch_platform(cls) -> Any:
        """Return torch's module of the type, such as ``torch.cuda``. Imports torch."""
        return AcceleratorUtil.get_torch_platform(cls.KIND)

    @classmethod
    def get_device_type(cls) -> str:
        """Return torch's name of the type's devices."""
        return AcceleratorUtil.get_device_type(cls.KIND)

    @classmethod
    def get_accel_pg_options(cls, options: Any) -> Any:
        """Return *options* for a process group of the type's backend; None for its defaults. Imports torch."""
        return AcceleratorUtil.get_accel_pg_options(cls.KIND, options)

    @classmethod
    def modify_profiling_context(cls, py_executable: str, profiling_cfg: Any, output_prefix: str) -> str:
        """Return the command line that runs *py_executable* under the type's profiler, if it has one."""
        return py_executable

    @classmethod
    def get_profiling_env_vars(cls, profiling_cfg: Any, output_prefix: str) -> dict[str, str]:
        """Return the variables that the type's profiler needs."""
        return {}

    @classmethod
    def check_profiler(cls, profiling_cfg: ProfileConfig) -> bool:
        """Return True if the profiler's program is on the PATH of this process."""
        return profiling_cfg.check()

    @classmethod
    def start_profiling(cls, step_idx: int | None = None) -> None:
        """Let the profiler of this process record from now on."""
        AcceleratorUtil.start_profiling(cls.KIND, step_idx)

    @classmethod
    def stop_profiling(cls) -> None:
        """Let the profiler of this process stop recording."""
        AcceleratorUtil.stop_profiling(cls.KIND)

    @classmethod
    def is_profiling_active(cls) -> bool:
        """Return True if the profiler records."""
        return False

    @classmethod
    def profiling_range(
        cls, label: str, color: str | None = None, domain: str | None = None
    ) -> AbstractContextManager[None]:
        """Return a context manager that shows its block as a range in the profile."""
        if cls.KIND is AcceleratorType.NO_ACCEL:
            return contextlib.nullcontext()
        return AcceleratorUtil.profiling_range(cls.KIND, label, color, domain)


@AcceleratorManager.register_manager(AcceleratorType.AMD_GPU)
class AMDGPUManager(AcceleratorManager):
    """AMD's GPUs."""

    @classmethod
    def modify_profiling_context(cls, py_executable: str, profiling_cfg: Any, output_prefix: str) -> str:
        """Return the command line that runs *py_executable* under ``rocprof-sys-python``."""
        return shlex.join([*profiling_cfg.to_cli_tokens(), py_executable])

    @classmethod
    def get_profiling_env_vars(cls, profiling_cfg: Any, output_prefix: str) -> dict[str, str]:
        """Return the variables that say where the profiler's files go."""
        found: dict[str, str] = profiling_cfg.variables(*os.path.split(output_prefix))
        return found


@AcceleratorManager.register_manager(AcceleratorType.NPU)
class AscendNPUManager(AcceleratorManager):
    """Huawei's Ascend NPUs."""


@AcceleratorManager.register_manager(AcceleratorType.INTEL_GPU)
class IntelGPUManager(AcceleratorManager):
    """Intel's GPUs."""

    @classmethod
    def get_torch_platform(cls) -> Any:
        """Return ``torch.xpu``. If it has no ``ipc_collect``, as some versions, it gets one that does nothing."""
        platform = super().get_torch_platform()
        if not hasattr(platform, "ipc_collect"):
            platform.ipc_collect = lambda: None
        return platform


@AcceleratorManager.register_manager(AcceleratorType.KUNLUN_XPU)
class KunlunXPUManager(AcceleratorManager):
    """Baidu's Kunlun XPUs."""


@AcceleratorManager.register_manager(AcceleratorType.MUSA_GPU)
class MUSAGPUManager(AcceleratorManager):
    """Moore Threads' GPUs."""
