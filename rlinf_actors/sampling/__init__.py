"""Rounds of questions to the head and the nodes, and what they say together, for `serve` and `top`. It only asks."""
