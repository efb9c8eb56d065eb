"""The built-in vendors of accelerators: one module each, with a function ``find(environ) -> FoundAccelerators``.

``catalog`` recognises the vendors that are present, from files alone. ``machine`` gives the modules the files of the
machine, and runs the vendors' tools with a time limit. The probe runs each vendor's module in a child process, since
its library may hang or crash.
"""
