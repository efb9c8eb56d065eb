"""Routing: which elements of a batch travel from which rank of one group to which rank of another. Pure."""
