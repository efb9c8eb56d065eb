"""How a collective is to be run on accelerators."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class CollectiveGroupOptions:
    """Options of a message or broadcast; the names are RLinf's.

    They concern tensors that go through a CCL (the path "lane", see ``rlinf-actors paths``): the sender's are
    used, and lanes with other options are others. For what goes another way they are kept, and change nothing;
    so are those that the accelerator's CCL has not (its row in model/accelerator_table.py says which it has).

    Attributes:
        accel_cluster_size: size of a cluster of thread blocks (NCCL's ``cgaClusterSize``), None for the default.
        accel_max_ctas: most thread blocks per kernel (``maxCTAs``), None for the default.
        accel_min_ctas: fewest thread blocks per kernel (``minCTAs``), None for the default.
        is_high_priority_stream: whether kernels run on a stream of high priority.
        use_ring_broadcast: kept; a broadcast goes down its tree.
    """

    accel_cluster_size: int | None = None
    accel_max_ctas: int | None = None
    accel_min_ctas: int | None = None
    is_high_priority_stream: bool = False
    use_ring_broadcast: bool = False
