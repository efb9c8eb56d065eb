"""Workers that configure Python's logging in different ways, or not at all."""

from __future__ import annotations

import logging
import logging.config
import sys

from rlinf_actors import Worker


class Plain(Worker):
    def __init__(self) -> None:
        super().__init__()
        self.configure()

    def configure(self) -> None:
        """Configure nothing."""

    def say(self) -> None:
        self.log_debug("at debug")
        self.log_info("at info")
        logging.getLogger("mine").warning("of my own")

    def fail(self) -> None:
        try:
            raise ValueError("wrong é\n\x1b[2J")
        except ValueError:
            Worker.logger.exception("it failed")


class Basic(Plain):
    def configure(self) -> None:
        logging.basicConfig(level=logging.DEBUG, stream=sys.stdout, format="basic %(name)s %(message)s")


class OnRoot(Plain):
    def configure(self) -> None:
        logging.getLogger().addHandler(handler("root"))


class OnOwn(Plain):
    """A handler on the worker's logger, with its level, and nothing for the root."""

    def configure(self) -> None:
        Worker.logger.addHandler(handler("own"))
        Worker.logger.setLevel(logging.DEBUG)


class OnOwnAlone(OnOwn):
    def configure(self) -> None:
        super().configure()
        logging.getLogger().addHandler(handler("root"))
        Worker.logger.propagate = False


class ByName(Plain):
    """Configuration of all by dictConfig, with the logger of all workers by name."""

    def configure(self) -> None:
        form = {"format": "named %(message)s"}
        logging.config.dictConfig(
            {
                "version": 1,
                "formatters": {"f": form},
                "handlers": {"h": {"class": "logging.StreamHandler", "formatter": "f", "stream": "ext://sys.stdout"}},
                "loggers": {"rlinf_actors.worker": {"handlers": ["h"], "level": "INFO"}},
            }
        )


class ForRoot(Plain):
    """Configuration of the root alone, which disables all other loggers that exist, except ours."""

    def configure(self) -> None:
        handlers = {"h": {"class": "logging.StreamHandler", "stream": "ext://sys.stdout"}}
        logging.config.dictConfig({"version": 1, "handlers": handlers, "root": {"handlers": ["h"]}})


def handler(name: str) -> logging.Handler:
    made = logging.StreamHandler(sys.stdout)
    made.setFormatter(logging.Formatter(f"{name} %(message)s"))
    return made
