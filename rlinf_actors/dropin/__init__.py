"""Runs programs written for RLinf's scheduler on rlinf_actors: the names of `rlinf.scheduler`, unchanged, without Ray.

`install` makes the import system serve `rlinf.scheduler` and all modules below it from rlinf_actors. RLinf's own
checkout stays as it is, and every other module of `rlinf` comes from it.
"""

from rlinf_actors.dropin.door import install as install
from rlinf_actors.dropin.door import installed as installed

__all__ = ["install", "installed"]
