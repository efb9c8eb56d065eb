"""Stands in for `ray.actor`, which programs import for its types."""


class ActorHandle:
    """Type of Ray's actors, for annotations. No object here has it."""
