"""Worker.start_profile and Worker.stop_profile: the steps that a profiler records.

Under nsys and rocprof-sys they open and close the profiler's window. With ``backend: torch``, torch.profiler runs
between them, and each window becomes a file of its own.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from rlinf_actors.hardware.profiler_windows import profiler_of
from rlinf_actors.model.hardware import AcceleratorType

if TYPE_CHECKING:
    import logging

    from rlinf_actors.config.profiling_config import ProfileConfig, TorchProfileConfig
    from rlinf_actors.worker.context import WorkerContext


class Profiled:
    """The methods of Worker for profilers."""

    _context: WorkerContext | None
    _logger: logging.Logger
    _accelerator_type: AcceleratorType
    _group_name: str
    _rank: int
    _torch_profile: Any = None  # while torch.profiler runs: (the profiler, the path of its file)

    def start_profile(self, step_idx: int | None = None) -> None:
        """Begin to record in the profiler of this worker (``cluster.profiling``).

        Without a profiler, while it records, or for a step that the configuration leaves out, nothing happens.

        Args:
            step_idx: number of the training step.
        """
        config = self._profiling()
        if config is None or (step_idx is not None and not config.should_profile_step(step_idx)):
            return
        from rlinf_actors.config.profiling_config import TorchProfileConfig

        if isinstance(config, TorchProfileConfig):
            if config.profiles_worker(self._group_name, self._rank) and self._torch_profile is None:
                self._start_torch(config, step_idx)
            return
        window = profiler_of(self._accelerator_type)
        if window is not None:
            window.start(step_idx)

    def stop_profile(self) -> None:
        """Stop recording. With ``backend: torch``, write the file. Without `start_profile`, nothing happens."""
        window = profiler_of(self._accelerator_type) if self._profiling() is not None else None
        if window is not None:
            window.stop()
        if self._torch_profile is not None:
            profiler, path = self._torch_profile
            self._torch_profile = None
            profiler.__exit__(None, None, None)
            profiler.export_chrome_trace(path)
            self._logger.info("the profile is in %s", path)

    def _profiling(self) -> ProfileConfig | None:
        config = self._context.extras.get("cluster_config") if self._context is not None else None
        return config.profiling if config is not None else None

    def _start_torch(self, config: TorchProfileConfig, step_idx: int | None) -> None:
        from torch import profiler

        assert self._context is not None
        directory = config.output_dir or os.path.dirname(self._context.place.out_path)
        os.makedirs(directory, exist_ok=True)
        step = "" if step_idx is None else f"-step{step_idx}"
        name = self._group_name.replace("/", "_")
        path = os.path.join(directory, f"{name}-{self._rank}{step}.profile.json")
        options: dict[str, Any] = {"record_shapes": config.record_shapes, "profile_memory": config.profile_memory}
        running: Any = profiler.profile(**options, with_stack=config.with_stack)
        running.__enter__()
        self._torch_profile = (running, path)
