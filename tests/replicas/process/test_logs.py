"""Both formats of the log: what a line holds, and what it must not."""

import json
import logging
import subprocess
import sys
from collections.abc import Callable

import pytest

from replicas.process.logs import TEXT_FORMAT, JsonFormatter, TextFormatter

Say = Callable[[logging.Logger], None]


@pytest.fixture(autouse=True)
def plain_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM, where another test has loaded it, adds a field to every record of the process."""
    monkeypatch.setattr(logging, "_logRecordFactory", logging.LogRecord)


class Lines(logging.Handler):
    def __init__(self, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


def said(say: Say, formatter: logging.Formatter, name: str = "replicas.somewhere") -> str:
    logger = logging.Logger(name)
    handler = Lines(formatter)
    logger.addHandler(handler)
    say(logger)
    (line,) = handler.lines
    return line


def as_json(say: Say, name: str = "replicas.somewhere") -> dict[str, object]:
    line = said(say, JsonFormatter({"service": "replica"}), name)
    assert "\n" not in line
    entry = json.loads(line)
    assert isinstance(entry, dict)
    return entry


def test_a_json_line_has_the_fields_of_the_message_apart_and_the_process_in_each() -> None:
    entry = as_json(
        lambda log: log.info("serving model=%s blocks=%d share=%.1f last=%r", "a b", 7, 0.5, None)
    )
    assert entry.pop("time").endswith("+00:00")  # type: ignore[attr-defined]
    assert entry == {
        "level": "info",
        "logger": "replicas.somewhere",
        "message": "serving",
        "service": "replica",
        "model": "a b",
        "blocks": 7,
        "share": 0.5,
        "last": "None",
    }


def test_the_text_says_the_same_in_one_sentence() -> None:
    text = said(lambda log: log.info("serving model=%s blocks=%d", "a", 7), TextFormatter("%(message)s"))
    assert text == "serving model=a blocks=7"


@pytest.mark.parametrize(
    ("template", "arguments", "message", "fields"),
    [
        ("replica %s joins model=%s at %d%%", ("r1", "m", 5), "replica r1 joins at 5%", {"model": "m"}),
        ("nothing to add", (), "nothing to add", {}),
        ("100%% sure of x=%s", ("y",), "100% sure of", {"x": "y"}),
        ("no arguments x=%s", (), "no arguments x=%s", {}),
        ("by name x=%(x)s", ({"x": 1},), "by name x=1", {}),
        ("two lines error=%s", ("a\nb",), "two lines", {"error": "a\nb"}),
    ],
)
def test_what_is_no_field_stays_in_the_message(
    template: str, arguments: tuple[object, ...], message: str, fields: dict[str, object]
) -> None:
    entry = as_json(lambda log: log.info(template, *arguments))
    assert entry["message"] == message
    assert {name: entry.get(name) for name in fields} == fields


def test_extra_fields_are_fields() -> None:
    entry = as_json(lambda log: log.warning("it ended", extra={"replica": "r7"}))
    assert (entry["message"], entry["replica"], entry["level"]) == ("it ended", "r7", "warning")


def fail_deeply(secret: str) -> None:
    try:
        {}[secret]
    except KeyError as error:
        raise ExceptionGroup("of " + secret, [ValueError(secret)]) from error


def crash(log: logging.Logger) -> None:
    try:
        fail_deeply("words of a client")
    except ExceptionGroup:
        log.exception("a request failed")


@pytest.mark.parametrize("formatter", [TextFormatter(TEXT_FORMAT), JsonFormatter({})])
@pytest.mark.parametrize("name", ["router.api.serving", "uvicorn.error", "asyncio"])
def test_an_exception_near_a_client_is_logged_without_its_words(
    formatter: logging.Formatter, name: str
) -> None:
    line = said(crash, formatter, name)
    assert "words of a client" not in line
    for expected in ("KeyError", "ExceptionGroup", "ValueError", "fail_deeply", __file__):
        assert expected in line


@pytest.mark.parametrize("formatter", [TextFormatter(TEXT_FORMAT), JsonFormatter({})])
def test_elsewhere_an_exception_is_logged_as_it_is(formatter: logging.Formatter) -> None:
    line = said(crash, formatter, "replicas.loop")
    assert "words of a client" in line
    assert "Traceback" in line


@pytest.mark.parametrize("module", ["router", "replicas"])
def test_a_wrong_log_setting_is_one_sentence(module: str) -> None:
    command = [sys.executable, "-m", module, "--log-format=xml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (2, "setting log_format is text or json, not xml\n")


def test_a_log_file_that_cannot_be_opened_leaves_standard_error() -> None:
    program = (
        "import logging, pathlib; from replicas.process.logs import set_up_logs;"
        "set_up_logs(file=pathlib.Path('/nowhere/x.log')); logging.getLogger('x').info('still said')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "cannot log to /nowhere/x.log" in done.stderr
    assert "still said" in done.stderr
