"""The Locust load tests: `locust -f loadtests/locustfile.py --host http://127.0.0.1:8000`.

Owns what Locust finds here: the options, the user, the shape, and which sides of a run a process has.
"""

from typing import Any

from locust import LoadTestShape, events
from locust.runners import MasterRunner, WorkerRunner

from loadtests.load.leader import LoadLeader
from loadtests.load.options import add_arguments
from loadtests.load.users import ChatUser
from loadtests.load.worker import LoadWorker

__all__ = ["ChatUser", "Load"]


class Load(LoadTestShape):
    """Sets the number of users that the run needs; -u, -r and -t are ignored."""

    leader: LoadLeader | None = None

    def tick(self) -> tuple[int, float] | None:
        assert self.leader is not None
        return self.leader.tick()


def _add_options(parser: Any, **_: Any) -> None:
    add_arguments(parser)


def _take_sides(environment: Any, runner: Any, **_: Any) -> None:
    """The sending side first: at a run's end it hands over its last records."""
    if not isinstance(runner, MasterRunner):
        LoadWorker(environment, runner)
    if not isinstance(runner, WorkerRunner):
        Load.leader = LoadLeader(environment, runner)


events.init_command_line_parser.add_listener(_add_options)
events.init.add_listener(_take_sides)
