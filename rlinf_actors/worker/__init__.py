"""The class that users subclass, and the process that runs it."""
