"""Stands in for `ray.util.queue`."""
