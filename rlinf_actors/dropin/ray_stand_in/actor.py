"""Stands in for `ray.actor`, which programs import for its types."""
