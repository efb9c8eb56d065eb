"""RLinf's names about NVIDIA's GPUs: their EGL devices and their profiler. RLinf's tests replace the functions here."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import os
import shlex
from contextlib import AbstractContextManager
from typing import Any

from rlinf_actors.config.profiling_config import NsightConfig
from rlinf_actors.dropin.accelerator_managers import AcceleratorManager
from rlinf_actors.hardware import profiler_windows
from rlinf_actors.hardware.egl import egl_indices
from rlinf_actors.model.accelerator_table import EGL_DEVICE_VARIABLES, renders_with_egl
from rlinf_actors.model.hardware import AcceleratorType

log = logging.getLogger(__name__)

EGL_DEVICE_ID_ENV_VARS = EGL_DEVICE_VARIABLES
_nv_profiling_active = False
"""True while the profiler of this process records."""


def _query_egl_index_by_cuda_ordinal() -> dict[int, int]:
    return egl_indices()


@functools.cache
def _egl_index_by_cuda_device() -> dict[int, int]:
    """Return the EGL index of each CUDA device that this process sees, by the device's id; empty without EGL."""
    try:
        found = _query_egl_index_by_cuda_ordinal()
    except (OSError, RuntimeError) as error:
        log.debug("the EGL devices cannot be listed: %s", error)
        return {}
    visible = NvidiaGPUManager.get_visible_devices()
    if not visible:
        return found
    return {int(visible[ordinal]): index for ordinal, index in found.items() if ordinal < len(visible)}


def _renders_with_egl() -> bool:
    return renders_with_egl(os.environ)


def _torch_needs_avoid_record_streams() -> bool:
    """True if torch is older than 2.8, which has the behaviour by default."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return True
    return tuple(int(part) for part in version.partition("+")[0].split(".")[:2]) < (2, 8)


@AcceleratorManager.register_manager(AcceleratorType.NV_GPU)
class NvidiaGPUManager(AcceleratorManager):
    """NVIDIA's GPUs."""

    @classmethod
    def get_accelerator_env_var(cls, visible_accelerators: list[str]) -> dict[str, str]:
        """Return the variables of a process that sees only *visible_accelerators*, for its renderers and NCCL too."""
        found = super().get_accelerator_env_var(visible_accelerators)
        if visible_accelerators and _renders_with_egl():
            device = visible_accelerators[0]
            index = cls.get_egl_device_id(device)
            found.update(dict.fromkeys(EGL_DEVICE_ID_ENV_VARS, device if index is None else str(index)))
        found["NCCL_CUMEM_ENABLE"] = os.environ.get("NCCL_CUMEM_ENABLE", "0")
        if _torch_needs_avoid_record_streams():
            found["TORCH_NCCL_AVOID_RECORD_STREAMS"] = "1"
        return found

    @staticmethod
    def get_egl_device_id(cuda_device_id: int | str) -> int | None:
        """Return the EGL index of a CUDA device that this process sees; None for others, and for UUIDs."""
        try:
            device = int(cuda_device_id)
        except ValueError:
            return None
        return _egl_index_by_cuda_device().get(device)

    @classmethod
    def modify_profiling_context(cls, py_executable: str, profiling_cfg: Any, output_prefix: str) -> str:
        """Return the command line that runs *py_executable* under ``nsys profile``."""
        return shlex.join(["nsys", "profile", *profiling_cfg.to_cli_tokens(output_prefix), py_executable])

    @classmethod
    def start_profiling(cls, step_idx: int | None = None) -> None:
        """Let the profiler of this process record from now on."""
        _profiler.start(step_idx)

    @classmethod
    def stop_profiling(cls) -> None:
        """Let the profiler of this process stop recording."""
        _profiler.stop()

    @classmethod
    def is_profiling_active(cls) -> bool:
        """Return True if the profiler records."""
        return _profiler.active

    @classmethod
    def profiling_range(
        cls, label: str, color: str | None = None, domain: str | None = None
    ) -> AbstractContextManager[None]:
        """Return a context manager that shows its block as a range in the profile, while the profiler records."""
        return _profiler.range(label)


AcceleratorManager.profiling_config_register[AcceleratorType.NV_GPU] = NsightConfig
_profiler = profiler_windows.CudaProfiler(lambda: globals(), "_nv_profiling_active")
profiler_windows.replace_profiler(AcceleratorType.NV_GPU, _profiler)
