"""A generator's parameters as they are typed, NAME=VALUE: which there are, what numbers make sense. Pure.

Owns the sentences for those that do not.
"""

import inspect
import math

from loadtests.workloads import GENERATORS

MAY_BE_ZERO = ("system_tokens", "tools_tokens", "common_tokens", "shared_tokens", "prefix_tokens", "exponent")
MOST_EXPONENT = 20.0
"""Beyond, the first of a thousand gets everything, and powers end somewhere."""

MOST = 1e6
"""Bound for all else: tokens, tenants, requests."""


def parameter_names(workload: str, *, without: tuple[str, ...] = ()) -> list[str]:
    """None for what is no generator. The seed is never one of them."""
    generator = GENERATORS.get(workload)
    known = () if generator is None else inspect.signature(generator).parameters
    return [name for name in known if name not in ("seed", *without)]


def read_parameter(workload: str, setting: str, *, without: tuple[str, ...] = ()) -> tuple[str, int | float]:
    """Raises ValueError."""
    names = parameter_names(workload, without=without)
    name, equals, text = setting.partition("=")
    if not equals or name not in names:
        known = ", ".join(names) or "none"
        raise ValueError(f"{setting} is not NAME=VALUE of one of {workload}'s parameters: {known}")
    kind = type(inspect.signature(GENERATORS[workload]).parameters[name].default)
    is_share = name == "share" or name.endswith("_share")
    least = 0.0 if is_share or name in MAY_BE_ZERO else math.nextafter(0.0, 1.0)
    most = 1.0 if is_share else MOST_EXPONENT if name == "exponent" else MOST
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most:
        what = "a whole number" if kind is int else "a number"
        bounds = "from 0" if least == 0 else "above 0"
        bounds += f" and up to {most:,.0f}"
        raise ValueError(f"{name} takes {what} {bounds}, not {text}")
    return name, value
