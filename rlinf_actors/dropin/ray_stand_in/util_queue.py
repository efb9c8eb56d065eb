"""Stands in for `ray.util.queue`."""

from rlinf_actors.dropin.ray_names import Empty as Empty
from rlinf_actors.dropin.ray_names import Full as Full
from rlinf_actors.dropin.ray_names import Queue as Queue
