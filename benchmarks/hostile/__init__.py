"""Members with valid keys that flood a head, and what other members notice: ``python -m benchmarks.hostile``.

The head and the victims run on one processor, the hostile members on another. The victims are an agentd's session whose
worker holds a lease of a robot, the driver that owns the robot, and a driver that measures control round trips.
"""
