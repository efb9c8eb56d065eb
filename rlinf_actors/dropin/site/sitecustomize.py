"""Prepares a Python process of a job that runs on rlinf_actors.dropin (rlinf_actors_gate.py).

PYTHONPATH has the directory of this file in the processes that such a program starts. Python imports one sitecustomize,
so this one then imports the next one on sys.path.
"""

import os
import sys

import rlinf_actors_gate  # type: ignore[import-not-found] # beside this file

rlinf_actors_gate.set_up()
_HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _HERE]  # PYTHONPATH keeps it, for children

_this = sys.modules.pop("sitecustomize")
try:
    import sitecustomize  # type: ignore[import-not-found] # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "sitecustomize":
        raise
    sys.modules["sitecustomize"] = _this
