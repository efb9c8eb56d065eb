"""Benchmarks: the project, the raw limits of the machine and Ray, in turn in one run. ``python -m benchmarks``.

Sessions of Ray run in Ray's own environment, which has no third-party module of ours: outside ``raw`` and
``backends``, modules here import the standard library alone at the top.
"""
