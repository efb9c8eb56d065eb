"""CollectiveGroupOptions: options of the process groups that carry tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class CollectiveGroupOptions:
    """Options of the process groups that carry the tensors of a message or broadcast. The names are RLinf's.

    They apply to tensors that travel through a collective communication library (CCL; the path "lane", see
    ``rlinf-actors paths``). The sender's options are used. Messages with different options use different lanes. An
    option has no effect on other paths, nor if the accelerator's CCL does not have it
    (model/accelerator_table.py lists the options of each CCL).

    Attributes:
        accel_cluster_size: size of a cluster of thread blocks (NCCL's ``cgaClusterSize``); None for the default.
        accel_max_ctas: most thread blocks per kernel (``maxCTAs``); None for the default.
        accel_min_ctas: fewest thread blocks per kernel (``minCTAs``); None for the default.
        is_high_priority_stream: True to run kernels on a stream of high priority.
        use_ring_broadcast: accepted for compatibility and ignored: a broadcast always uses a tree.
    """

    accel_cluster_size: int | None = None
    accel_max_ctas: int | None = None
    accel_min_ctas: int | None = None
    is_high_priority_stream: bool = False
    use_ring_broadcast: bool = False
