"""The template: a process that has imported what workers need, and forks a worker per request."""
