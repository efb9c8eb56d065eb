"""Stands in for `ray.util`."""
