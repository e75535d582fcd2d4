"""Checks at a start that the installed vLLM is one that is served, and names what it lacks.

Owns the oldest and the newest version, and the sentences for what is missing; the names are in `reads.py`.
Imports vLLM only in the check, and no module of this folder that does: they may fail in such a version.
"""

import dis
import functools
import importlib
import inspect
import logging
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from replicas.errors import StartupError
from replicas.vllm_engine.reads import READS, TIER_READS, Reads

logger = logging.getLogger(__name__)

OLDEST, OLDEST_WITH_TIERS, NEWEST = "0.30", "0.32", "0.33"

_NUM_NAMED = 4
"""Missing names in a sentence; of a much older version hundreds may be missing."""


def check_version(*, has_tiers: bool) -> None:
    """Raises StartupError that names what the installed vLLM lacks. Takes milliseconds besides its import."""
    version = str(importlib.import_module("vllm").__version__)
    if lacking := _named(missing_names(READS)):
        raise StartupError(f"vLLM {version} lacks {lacking}: Kvasir needs vLLM {OLDEST} to {NEWEST}")
    if has_tiers and (lacking := _named(missing_names(TIER_READS))):
        raise StartupError(
            f"vLLM {version} lacks {lacking}: host_kv_bytes needs vLLM {OLDEST_WITH_TIERS} to {NEWEST};"
            " without that setting this version is served"
        )
    if not _number(OLDEST) <= _number(version) <= _number(NEWEST):
        logger.warning(
            "Kvasir is written for vLLM %s to %s; vLLM %s has all that it reads, and may use it otherwise",
            OLDEST,
            NEWEST,
            version,
        )


def missing_names(reads: Reads) -> Iterator[str]:
    """Yield what the installed vLLM does not have, as `Object.name`, or an object or module as a whole."""
    for module_name, objects in reads.items():
        module = _module(module_name)
        if module is None:
            yield module_name
            continue
        for name, attributes in objects.items():
            try:
                found: Any = functools.reduce(getattr, name.split("."), module)
            except AttributeError:
                yield f"{module_name}.{name}"
                continue
            yield from (f"{name}.{each}" for each in attributes.split() if not _has(found, each))


def _module(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] == "vllm":
            return None
        raise


def _has(found: Any, name: str) -> bool:
    if inspect.isroutine(found):
        return name in inspect.signature(found).parameters
    if hasattr(found, name):
        return True
    return inspect.isclass(found) and any(
        name in vars(base).get("__annotations__", ()) or name in _assigned(base) for base in found.__mro__
    )


@functools.cache
def _assigned(base: type) -> frozenset[str]:
    """Return the attributes that its constructor sets."""
    constructor = vars(base).get("__init__")
    if not inspect.isfunction(constructor):
        return frozenset()
    instructions = dis.get_instructions(inspect.unwrap(constructor))
    return frozenset(each.argval for each in instructions if each.opname == "STORE_ATTR")


def _named(missing: Iterator[str]) -> str:
    names = list(missing)
    more = len(names) - _NUM_NAMED
    return ", ".join(names[:_NUM_NAMED]) + (f" and {more} more" if more > 0 else "")


def _number(version: str) -> tuple[int, ...]:
    """Return the first two numbers; of a version without them none, which is below all."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return () if found is None else tuple(map(int, found.groups()))
