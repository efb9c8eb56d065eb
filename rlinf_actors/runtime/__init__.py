"""One process's connections: to the head, and to the workers it talks to."""
