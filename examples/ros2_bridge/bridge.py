"""A worker that is a ROS 2 node: it puts what it receives into channels, and publishes commands.

Only the node where this worker runs needs ROS (rclpy, sensor_msgs). Start its interpreter with ROS's environment.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from messages import Image, JointState, M, from_ros, to_ros

from rlinf_actors import Channel, Worker

NO_ROS = (
    "The bridge needs ROS 2: run `source /opt/ros/jazzy/setup.bash` (with your release) in the shell that starts this "
    "node's agentd, or your program if it has no cluster"
)
"""The error on a node without ROS."""


class RosBridge(Worker):
    """The node /rlinf_bridge.

    Args:
        joints, images, commands: topics. Joint states and images are received, and commands are published.
    """

    def __init__(self, joints: str, images: str, commands: str) -> None:
        super().__init__()
        try:  # here, so that the driver and other workers need no ROS
            import rclpy  # type: ignore[import-not-found]
            import sensor_msgs.msg  # type: ignore[import-not-found]
            from rclpy.signals import SignalHandlerOptions  # type: ignore[import-not-found]
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"{error}. {NO_ROS}", name=error.name) from None

        self.topics, self.messages, self.rclpy = (joints, images), sensor_msgs.msg, rclpy
        rclpy.init(signal_handler_options=SignalHandlerOptions.NO)  # the worker handles its signals
        self.node = rclpy.create_node("rlinf_bridge")
        self.publisher = self.node.create_publisher(self.messages.JointState, commands, 10)
        self.dropped = 0

    def serve(self, joints: Channel, images: Channel) -> int:
        """Put received messages into the channels until `stop`. Return how many were dropped.

        A message is dropped if its channel is full, so a slow consumer gets no queue of old messages.
        """
        from rclpy.executors import ExternalShutdownException  # type: ignore[import-not-found]
        from rclpy.qos import qos_profile_sensor_data  # type: ignore[import-not-found]

        def subscribe(kind: type[M], ros_kind: Any, topic: str, channel: Channel) -> None:
            def received(message: Any) -> None:
                try:
                    channel.put_nowait(from_ros(kind, message))
                except asyncio.QueueFull:
                    self.dropped += 1

            self.node.create_subscription(ros_kind, topic, received, qos_profile_sensor_data)

        subscribe(JointState, self.messages.JointState, self.topics[0], joints)
        subscribe(Image, self.messages.Image, self.topics[1], images)
        with contextlib.suppress(ExternalShutdownException):
            self.rclpy.spin(self.node)
        return self.dropped

    @Worker.concurrent()
    def command(self, state: JointState) -> None:
        """Publish a command. It runs on a thread of its own while `serve` runs."""
        self.publisher.publish(to_ros(state, self.messages.JointState()))

    @Worker.concurrent()
    def stop(self) -> None:
        """End `serve`."""
        self.rclpy.try_shutdown()

    def _close(self) -> None:
        self.rclpy.try_shutdown()
