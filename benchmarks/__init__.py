"""Benchmarks of the project, the raw limits of the machine, and Ray, in one run: ``python -m benchmarks``.

Sessions of Ray run in a separate environment, which lacks our third-party packages. So modules outside ``raw`` and
``backends`` import only the standard library at the top.
"""
