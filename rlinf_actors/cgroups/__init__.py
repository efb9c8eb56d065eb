"""Limits of the kernel for a worker and all processes that the worker starts."""
