"""What RLinf's unit tests give on Ray, recorded once, and which of them count here.

Recorded with RLinf at commit a3816b596478dcd8a5c69a6ec1468c9519f77b5b, Ray 2.x, two cores and no GPU.
"""

from __future__ import annotations

import re
from typing import NamedTuple

COMMIT = "a3816b596478dcd8a5c69a6ec1468c9519f77b5b"


class OnRay(NamedTuple):
    """The counts of one test file on Ray, and its seconds."""

    collected: int
    passed: int
    skipped: int
    seconds: float


FILES: dict[str, OnRay] = {
    "test_placement": OnRay(38, 38, 0, 3.9),
    "test_worker": OnRay(12, 12, 0, 30.7),
    "test_channel": OnRay(89, 73, 16, 43.6),
    "test_comm": OnRay(121, 58, 63, 56.9),
    "test_comm_mapper": OnRay(7, 7, 0, 6.3),
    "test_cluster_config": OnRay(56, 55, 1, 45.4),
    "test_auto_placement": OnRay(9, 9, 0, 3.3),
    "test_broadcast_sync": OnRay(25, 15, 10, 2.3),
    "test_gloo_fallback_staging": OnRay(6, 0, 6, 2.7),
    "test_intra_gpu_comm": OnRay(12, 0, 12, 2.6),
    "test_net_emulation": OnRay(15, 15, 0, 2.9),
    "test_robot_autoconfig": OnRay(11, 11, 0, 144.2),
    "test_distributed_ray_log_collector": OnRay(5, 5, 0, 15.7),
    "test_distributed_tracing": OnRay(3, 3, 0, 2.6),
    "test_nvidia_profiling": OnRay(9, 9, 0, 3.0),
    "test_intel_gpu_platform": OnRay(2, 2, 0, 2.8),
    "test_weight_syncer": OnRay(30, 15, 15, 3.6),
    "test_delay_sampler": OnRay(12, 12, 0, 3.0),
    "test_egl_render_device": OnRay(22, 21, 1, 3.7),
}

TIERS = {
    "A": "tests of the public API",
    "B": "tests that also use private names of rlinf.scheduler",
    "C": "tests of Ray's and torch's internals",
    "D": "tests of other parts of RLinf, which only import the scheduler",
    "G": "tests that need an accelerator",
    "P": "tests of private helpers of CollectiveGroup",
}
GOALS = {"A": 184, "B": 109}
"""Tests of a tier that pass on Ray, all of which have to pass here."""

_OTHERS = [  # (tier, pattern of FILE::CLASS::TEST); the first that is found decides, and A if none is
    ("P", r"^test_broadcast_sync::"),
    ("G", r"^test_(intra_gpu_comm|gloo_fallback_staging)::"),
    ("C", r"^test_distributed_ray_log_collector::|^test_worker::TestManagerNamespace"),
    ("C", r"^test_comm::.*MultiChannelProcessGroup"),
    ("D", r"^test_(auto_placement|weight_syncer|delay_sampler)::"),
    ("D", r"^test_comm_mapper::test_(policy_output_split|merge_env_outputs)"),
    ("D", r"^test_egl_render_device::test_(the_device_is_hidden|other_modules|a_failed_robosuite)"),
    ("D", r"^test_egl_render_device::test_(installing_the_shim|importing_the_env|real_robosuite)"),
    ("B", r"^test_(channel|nvidia_profiling|egl_render_device)::"),
    ("B", r"^test_worker::(TestClusterResource|TestLoadUserExtensions)|^test_distributed_tracing::TestTracerEmit"),
    ("B", r"^test_cluster_config::(test_merge_path_like_env_value_(append|ignores)|.*_in_worker_launch)"),
]  # fmt: skip


def tier_of(test: str) -> str:
    """Return the tier of *test*, ``file::class::test`` or ``file::test``."""
    return next((tier for tier, pattern in _OTHERS if re.search(pattern, test)), "A")
