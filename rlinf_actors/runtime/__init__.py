"""The connections of one process: to the head, and to the workers that the process exchanges messages with."""
