"""The vendors whose accelerators the probe finds: a module each, with ``find(environ) -> FoundAccelerators``.

``catalog`` says where to look for signs of a vendor; ``machine`` is what the modules see of the machine: its files, and
its tools with a time limit. A vendor's module runs in a process of its own, since its library may hang or crash.
"""
