"""GET /live/programs: the programs that a router knows, as JSON for operators.

Owns its shape and its bound. Session ids are clients' own and stay on the operators' routes.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from router.programs.book import Program, ProgramBook

MAX_LISTED = 100

STATES = ("waiting", "active", "paused")


def programs_data(book: ProgramBook, now: float) -> dict[str, Any]:
    """List programs that wait first, the longest wait before others, then active ones, then paused ones."""
    by_tenant: dict[str, Counter[str]] = {}
    for program in book.programs():
        by_tenant.setdefault(program.tenant, Counter())[program.state] += 1
    return {
        "tenants": [
            {"tenant": tenant, **{state: counts[state] for state in STATES}}
            for tenant, counts in sorted(by_tenant.items())
        ],
        "num_programs": len(book),
        "programs": [_data(program, now) for program in _first(book.programs())],
    }


def _first(programs: Iterable[Program]) -> list[Program]:
    def key(program: Program) -> tuple[int, float]:
        return STATES.index(program.state), program.waits_since or -program.seen_at

    return sorted(programs, key=key)[:MAX_LISTED]


def _data(program: Program, now: float) -> dict[str, Any]:
    waits_since, paused_at = program.waits_since, program.paused_at
    return {
        "tenant": program.tenant,
        "model": program.model,
        "source": program.name.source,
        "session": program.name.session,
        "agent": program.name.agent or None,
        "salt": program.name.salt or None,
        "state": program.state,
        "may_run": program.admitted_at is not None,
        "home": program.home,
        "tokens": program.num_tokens,
        "turns": program.num_turns,
        "attained_seconds": round(program.attained_seconds, 3),
        "waits_seconds": None if waits_since is None else round(max(0.0, now - waits_since), 3),
        "paused_seconds": None if paused_at is None else round(max(0.0, now - paused_at), 3),
        "is_shared_name": program.is_crowd,
        "prompt_tokens": program.used.num_prompt_tokens,
        "cached_tokens": program.used.num_cached_tokens,
        "output_tokens": program.used.num_output_tokens,
    }
