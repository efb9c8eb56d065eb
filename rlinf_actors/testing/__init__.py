"""Tools for users' tests: clusters on this machine, faults, simulated arms, a pytest plugin with leak checks."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlinf_actors.testing.local_cluster import LocalCluster as LocalCluster
    from rlinf_actors.testing.local_cluster import LocalNode as LocalNode

__all__ = ["LocalCluster", "LocalNode"]


if not TYPE_CHECKING:  # a type checker takes the imports above, and finds names that do not exist

    def __getattr__(name):
        if name in __all__:
            from rlinf_actors.testing import local_cluster

            return getattr(local_cluster, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
