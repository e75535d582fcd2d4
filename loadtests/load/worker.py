"""The side of a load test that sends: what a Locust worker, or a lone Locust process, does with a plan.

Owns the way of records to the leader: several times a second, and once more at the end.
"""

import dataclasses
import logging
from typing import Any

import gevent
from locust.env import Environment
from locust.runners import Runner, WorkerRunner

from loadtests.load.options import LoadOptions
from loadtests.load.users import ChatUser, Sender
from loadtests.reports.report import RequestRecord

PLAN, RECORDS = "loadtest-plan", "loadtest-records"
"""The messages: the leader's to each sending process, and theirs to it."""
FLUSH_SECONDS = 0.25

logger = logging.getLogger(__name__)


class LoadWorker:
    """Lives as long as its process; has a Sender while a run lasts."""

    def __init__(self, environment: Environment, runner: Runner) -> None:
        self._runner = runner
        self._run_id = ""
        self._pending: list[tuple[int, dict[str, Any]]] = []
        self._flusher: gevent.Greenlet | None = None
        runner.register_message(PLAN, self._take_plan)
        environment.events.test_stop.add_listener(self._stop)

    def _take_plan(self, environment: Environment, msg: Any, **_: Any) -> None:
        plan = msg.data
        self._run_id, self._pending = plan["run_id"], []
        ChatUser.sender = Sender(
            environment,
            plan["base_url"],
            LoadOptions(**plan["options"]),
            context_length=plan["context_length"],
            index=plan["index"],
            num_workers=plan["num_workers"],
            on_record=self._keep,
        )
        self._flusher = gevent.spawn(self._keep_flushing, ChatUser.sender)

    def _keep(self, number: int, record: RequestRecord) -> None:
        self._pending.append((number, dataclasses.asdict(record)))

    def _keep_flushing(self, sender: Sender) -> None:
        while not sender.is_done():
            gevent.sleep(FLUSH_SECONDS)
            if self._pending:
                self._flush(sender, is_done=False)
        self._flush(sender, is_done=True)

    def _flush(self, sender: Sender, *, is_done: bool) -> None:
        records, self._pending = self._pending, []
        sender_id = self._runner.client_id if isinstance(self._runner, WorkerRunner) else "local"
        message = {
            "run_id": self._run_id,
            "sender": sender_id,
            "records": records,
            "is_done": is_done,
        }
        self._runner.send_message(RECORDS, message)

    def _stop(self, **_: Any) -> None:
        """However the run ended. By now Locust has stopped its users."""
        sender, ChatUser.sender = ChatUser.sender, None
        if sender is None:
            return
        if self._flusher is not None:
            self._flusher.kill()
        if not sender.is_done():
            logger.info("stopped before the last answer")
        sender.stop()
        self._flush(sender, is_done=True)
