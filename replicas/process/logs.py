"""Logging for every process: one text format, or one JSON object per line.

Owns both formats. A call writes a value as `name=%s` in its message, once: text has it in place, JSON as a
field of its own outside the message.

Clients' text must never be logged, and an exception may quote it. So code that handles requests logs
exceptions with types and lines of code, without messages.
"""

import functools
import json
import logging
import re
import sys
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"

HANDLES_CLIENTS = ("router.api", "router.app", "uvicorn", "starlette", "asyncio")
"""Loggers whose exceptions may quote a client."""

_PLACEHOLDER = re.compile(r"%%|( )?(?:(\b[a-z_]+)=)?%[-+#0]*\d*(?:\.\d+)?([a-zA-Z])")

_OF_EVERY_RECORD = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}

_ExceptionInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


def set_up_logs(
    log_format: str = "text",
    log_level: str = "info",
    *,
    file: Path | None = None,
    fields: Mapping[str, str] | None = None,
    text_format: str = TEXT_FORMAT,
) -> None:
    """Send this process's log to `file`, or to standard error, as where the file cannot be opened. Called
    again, the last call counts.

    `fields` are of the process, and in each of its JSON objects.
    """
    handler: logging.Handler
    unopened: OSError | None = None
    try:
        handler = _StandardError() if file is None else logging.FileHandler(file)
    except OSError as error:
        handler, unopened = _StandardError(), error
    handler.setFormatter(JsonFormatter(fields or {}) if log_format == "json" else TextFormatter(text_format))
    logging.basicConfig(level=log_level.upper(), handlers=[handler], force=True)
    if unopened is not None:
        logging.getLogger(__name__).warning("cannot log to %s: %s", file, unopened.strerror)


class _StandardError(logging.Handler):
    """The current stderr: programs that call ours may have replaced it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)


class TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        if record.exc_info and _handles_clients(record.name):
            return "\n".join((self._without_exception(record), _exception_text(record.name, record.exc_info)))
        return super().format(record)

    def _without_exception(self, record: logging.LogRecord) -> str:
        bare = logging.makeLogRecord({**vars(record), "exc_info": None, "exc_text": None})
        return super().format(bare)


class JsonFormatter(logging.Formatter):
    """`time`, `level`, `logger` and `message`; the process's fields; those of the message and of `extra`."""

    def __init__(self, fields: Mapping[str, str]) -> None:
        super().__init__()
        self._fields = dict(fields)

    def format(self, record: logging.LogRecord) -> str:
        message, fields = _split(record)
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": message,
            **self._fields,
            **fields,
        }
        entry.update(
            {
                name: value
                for name, value in vars(record).items()
                if name not in _OF_EVERY_RECORD and not name.startswith("_")  # Ray notes times of its own
            }
        )
        if record.exc_info:
            entry["exception"] = _exception_text(record.name, record.exc_info)
        return json.dumps(entry, default=str)


def _handles_clients(logger: str) -> bool:
    return logger.startswith(HANDLES_CLIENTS)


def _exception_text(logger: str, info: _ExceptionInfo) -> str:
    error = info[1]
    if error is None:
        return ""
    if _handles_clients(logger):
        return "\n".join(_stack(error, set()))
    return "".join(traceback.format_exception(error)).rstrip("\n")


def _stack(error: BaseException, seen: set[int]) -> list[str]:
    """Format the exception and its causes, as types and lines of code."""
    seen.add(id(error))
    lines: list[str] = []
    origin = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if origin is not None and id(origin) not in seen:
        lines += [*_stack(origin, seen), "which led to"]
    lines.append(f"{type(error).__module__}.{type(error).__qualname__}")
    lines += [
        f"  {frame.filename}:{frame.lineno} in {frame.name}"
        for frame in traceback.extract_tb(error.__traceback__)
    ]
    if isinstance(error, BaseExceptionGroup):
        for member in error.exceptions:
            lines += [f"  | {line}" for line in _stack(member, seen)]
    return lines


def _split(record: logging.LogRecord) -> tuple[str, dict[str, object]]:
    """Return the message without its fields, and the fields."""
    arguments = record.args
    if not isinstance(record.msg, str) or not isinstance(arguments, tuple) or not arguments:
        return record.getMessage(), {}
    rest, names = _template(record.msg)
    if len(names) != len(arguments):
        return record.getMessage(), {}
    fields: dict[str, object] = {}
    unnamed = []
    for (name, conversion), value in zip(names, arguments, strict=True):
        if name is None:
            unnamed.append(value)
        else:
            fields[name] = _plain(value, conversion)
    return rest % tuple(unnamed), fields


@functools.lru_cache(maxsize=1024)
def _template(text: str) -> tuple[str, list[tuple[str | None, str]]]:
    """Return the text without each `name=%s`, and the name, if it has one, and the letter of each
    placeholder."""
    names: list[tuple[str | None, str]] = []

    def keep(match: re.Match[str]) -> str:
        _, name, conversion = match.groups()
        if conversion is not None:
            names.append((name, conversion))
        return match.group() if name is None else ""

    return _PLACEHOLDER.sub(keep, text), names


def _plain(value: object, conversion: str) -> object:
    if conversion == "r":
        return repr(value)
    return value if value is None or isinstance(value, bool | int | float) else str(value)
