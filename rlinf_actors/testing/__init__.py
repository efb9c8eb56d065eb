"""For tests of programs that use rlinf-actors: a cluster on this machine, and a pytest plugin with leak checks."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlinf_actors.testing.local_cluster import LocalCluster as LocalCluster
    from rlinf_actors.testing.local_cluster import LocalNode as LocalNode

__all__ = ["LocalCluster", "LocalNode"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from rlinf_actors.testing import local_cluster

        return getattr(local_cluster, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
