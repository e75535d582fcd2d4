"""Configuration of every process: one frozen dataclass, built once from file < environment < flags.

Owns the parsing, the same for replica, router and fleet. Each process declares a dataclass whose field names
are the YAML keys (`block_size`), the flags (`--block-size`) and, with a prefix, the environment variables
(`KVASIR_REPLICA_BLOCK_SIZE`). An unknown key anywhere is an error that names the nearest known one.
"""

import argparse
import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

Config = TypeVar("Config")


class SettingsError(ValueError):
    """A setting is unknown or unreadable. The message is one sentence for its user."""


def setting(
    default: Any = dataclasses.MISSING, *, help: str, minimum: float | None = None, above: float | None = None
) -> Any:
    """Return a dataclass field with the sentence that documents it in `--help`, and bounds for
    `check_bounds`."""
    return dataclasses.field(default=default, metadata={"help": help, "minimum": minimum, "above": above})


def old_setting(
    default: Any, *, instead: str, minimum: float | None = None, above: float | None = None
) -> Any:
    """Return a dataclass field that goes with the next version; `instead` says what to do about it.

    `default` is a value, or a function of the configuration. `fill_old_settings` puts it in where none is
    given. No help shows such a field.
    """
    metadata = {"default": default, "instead": instead, "minimum": minimum, "above": above}
    return dataclasses.field(default=None, repr=False, metadata=metadata)


def check_bounds(config: Any) -> None:
    """Raises SettingsError for the first value below its `minimum`, or not above its `above`."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        minimum, above = field.metadata.get("minimum"), field.metadata.get("above")
        if value is None:
            continue
        # Written so that nan is within no bounds.
        if minimum is not None and not value >= minimum:
            raise SettingsError(f"setting {field.name} must be at least {minimum}")
        if above is not None and not value > above:
            raise SettingsError(f"setting {field.name} must be above {above}")


def settings_of(config_class: type) -> "dict[str, dataclasses.Field[Any]]":
    """Return the fields of the settings that are not old, by name."""
    fields = dataclasses.fields(config_class)
    return {field.name: field for field in fields if "instead" not in field.metadata}


def old_settings_of(config_class: type) -> dict[str, str]:
    """Return what to do instead of setting each old name."""
    fields = dataclasses.fields(config_class)
    return {field.name: field.metadata["instead"] for field in fields if "instead" in field.metadata}


def fill_old_settings(config: Any) -> None:
    """Give old settings their defaults, and remember which were given. For `__post_init__`."""
    given = []
    for field in dataclasses.fields(config):
        if "instead" not in field.metadata:
            continue
        if getattr(config, field.name) is not None:
            given.append(field.name)
            continue
        default = field.metadata["default"]
        object.__setattr__(config, field.name, default(config) if callable(default) else default)
    object.__setattr__(config, "_old_settings_given", tuple(given))


def old_setting_warnings(config: Any) -> list[str]:
    """Return a sentence for each old setting that was given."""
    instead = old_settings_of(type(config))
    return [
        f"setting {name} still counts, and goes with the next version: {instead[name]}"
        for name in config._old_settings_given
    ]


def secret_setting(help: str) -> Any:
    """Return a text that no representation of its configuration shows, and that is None unless it is set."""
    return dataclasses.field(default=None, repr=False, metadata={"help": help})


def load_settings(
    config_class: type[Config],
    *,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    prefix: str,
    program: str,
    description: str,
) -> Config:
    """Build `config_class` from `--config FILE`, then `environment` (names start with `prefix`), then flags.

    Raises SettingsError; `--help` and malformed flags leave through argparse (SystemExit).
    """
    parser = argparse.ArgumentParser(prog=program, description=description, allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings; flags and environment win")
    fields = {field.name: field for field in dataclasses.fields(config_class)}  # type: ignore[arg-type]
    for name, field in fields.items():
        text = argparse.SUPPRESS if "instead" in field.metadata else _help_text(field)
        parser.add_argument(
            "--" + name.replace("_", "-"), dest=name, default=None, help=text, metavar="VALUE"
        )
    flags = vars(parser.parse_args(list(arguments)))
    config_file = flags.pop("config") or environment.get(prefix + "CONFIG")

    values: dict[str, Any] = {}
    if config_file:
        values.update(_from_file(Path(config_file), fields))
    for variable, text in environment.items():
        if variable.startswith(prefix) and variable != prefix + "CONFIG":
            name = variable.removeprefix(prefix).lower()
            _check_known(name, fields, f"environment variable {variable}")
            values[name] = text
    values.update({name: text for name, text in flags.items() if text is not None})
    return build(config_class, values)


def build(config_class: type[Config], values: Mapping[str, Any]) -> Config:
    """`config_class` from plain values (texts are converted to the field's type). Raises SettingsError."""
    hints = typing.get_type_hints(config_class)
    fields = {field.name: field for field in dataclasses.fields(config_class)}  # type: ignore[arg-type]
    for name in values:
        _check_known(name, fields, f"setting {name}")
    missing = [
        name
        for name, field in fields.items()
        if name not in values
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise SettingsError(f"setting {missing[0]} is required")
    converted = {name: _convert(name, value, hints[name]) for name, value in values.items()}
    try:
        return config_class(**converted)
    except SettingsError:
        raise
    except ValueError as error:
        raise SettingsError(str(error)) from error


def _from_file(path: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SettingsError(f"cannot read the settings file {path}: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsError(f"the settings file {path} is not a mapping of names to values")
    for name in content:
        _check_known(str(name), fields, f"key {name} in {path}")
    return content


def _check_known(name: str, fields: Mapping[str, Any], what: str) -> None:
    if name not in fields:
        known = [known for known, field in fields.items() if "instead" not in field.metadata]
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise SettingsError(f"unknown {what}{hint}")


def _convert(name: str, value: Any, kind: Any) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None or (isinstance(value, str) and value.lower() in ("none", "")):
            return None
        return _convert(name, value, next(option for option in arguments if option is not type(None)))
    try:
        if origin is Mapping:
            return _to_mapping(value)
        if origin is tuple:
            return tuple(_convert(name, item, arguments[0]) for item in _to_list(value))
        if kind is bool:
            return _to_bool(value)
        if kind in (int, float) and not isinstance(value, bool):
            return kind(value)
        if kind is str and isinstance(value, str):
            return value
        if isinstance(value, kind):
            return value
    except (TypeError, ValueError):
        pass
    raise SettingsError(f"setting {name} cannot be {value!r}; it takes {_kind_name(kind)}")


def _to_list(value: Any) -> Sequence[Any]:
    """A,B,C, or YAML's own form in brackets."""
    if isinstance(value, str):
        try:
            if not value.lstrip().startswith("["):
                return [item.strip() for item in value.split(",") if item.strip()]
            value = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ValueError(value) from error
    if not isinstance(value, list | tuple):
        raise TypeError(value)
    return value


def _to_mapping(value: Any) -> dict[str, Any]:
    """NAME=VALUE,NAME=VALUE, or YAML's own form in braces where a value has commas; values as in YAML."""
    if isinstance(value, str):
        try:
            if value.lstrip().startswith("{"):
                value = yaml.safe_load(value)
            else:
                pairs = [pair.partition("=") for pair in value.split(",")]
                if any(not name.strip() or not equals for name, equals, _ in pairs):
                    raise ValueError(value)
                value = {name.strip(): yaml.safe_load(text) for name, _, text in pairs}
        except yaml.YAMLError as error:
            raise ValueError(value) from error
    if not isinstance(value, Mapping):
        raise TypeError(value)
    return {str(name): item for name, item in value.items()}


def _to_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    known = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if isinstance(value, str) and value.lower() in known:
        return known[value.lower()]
    raise ValueError(value)


def _kind_name(kind: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    if typing.get_origin(kind) is Mapping:
        return "NAME=VALUE,NAME=VALUE"
    return names.get(kind, "a list: A,B,C")


def _help_text(field: "dataclasses.Field[Any]") -> str:
    text = str(field.metadata.get("help", "")).replace("%", "%%")
    if field.default is dataclasses.MISSING:
        return f"{text} (required)"
    return f"{text} (default: {field.default})"


# Settings that several processes have, and mean the same by.


def check_log_settings(log_format: str, log_level: str) -> None:
    """Raises SettingsError."""
    if log_format not in ("text", "json"):
        raise SettingsError(f"setting log_format is text or json, not {log_format}")
    if log_level not in ("debug", "info", "warning", "error"):
        raise SettingsError(f"setting log_level is debug, info, warning or error, not {log_level}")


def check_secret_settings(secret: str | None, secret_file: str | None) -> None:
    """Raises SettingsError."""
    if secret is not None and secret_file is not None:
        raise SettingsError("settings secret and secret_file cannot be used together")


def check_trace_settings(otlp_endpoint: str | None, trace_sample_ratio: float) -> None:
    """Raises SettingsError."""
    if otlp_endpoint is not None and not otlp_endpoint.startswith(("http://", "https://")):
        raise SettingsError(
            f"setting otlp_endpoint is an http or https address, not {without_password(otlp_endpoint)}"
        )
    if not 0 <= trace_sample_ratio <= 1:
        raise SettingsError(f"setting trace_sample_ratio is between 0 and 1, not {trace_sample_ratio:g}")


_PASSWORD_IN_A_QUERY = re.compile(r"([?&][a-z_]*password=)[^&#]*", re.IGNORECASE)


def without_password(url: str) -> str:
    """Return a URL as it may be printed and logged. Where it is unclear how far a password goes, more is
    hidden."""
    scheme, mark, rest = url.partition("://") if "://" in url else ("", "", url)
    user_and_password, at, place = rest.rpartition("@")
    user, colon, _ = user_and_password.partition(":")
    if colon:
        rest = f"{user}:***{at}{place}"
    return scheme + mark + _PASSWORD_IN_A_QUERY.sub(r"\1***", rest)
