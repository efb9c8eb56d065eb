"""Runs programs written for RLinf's scheduler on rlinf_actors: the names of `rlinf.scheduler`, unchanged, without Ray.

`install` makes the import system serve `rlinf.scheduler` and all modules below it from rlinf_actors. RLinf's own
checkout stays as it is, and every other module of `rlinf` comes from it.
"""

import os


def install() -> None:
    """Serve `rlinf.scheduler` from rlinf_actors in this process, in the processes that it starts, and in its workers.

    Where Ray is not installed, a stand-in serves what RLinf uses of `ray` beside its scheduler. A second call does
    nothing. The processes that this one starts find the names by the environment variables RLINF_ACTORS_DROPIN
    and PYTHONPATH.

    Raises:
        ImportError: rlinf.scheduler was imported from elsewhere before.
    """
    from rlinf_actors.dropin import door  # imported only if it is needed: every Python of a job imports this module

    door.install()


def install_if_asked() -> None:
    """Call `install` if RLINF_ACTORS_DROPIN is 1 in this process. Each template and worker calls this at its start."""
    if os.environ.get("RLINF_ACTORS_DROPIN") == "1":
        install()


__all__ = ["install"]
