"""How many files, and so connections, the process may have open.

Owns the soft limit, which many systems set to 1,024 where the hard one is far higher.
"""

import logging
import resource

logger = logging.getLogger(__name__)

OTHER_FILES = 1024
"""Open files besides clients' connections: replicas, Redis, pipes, logs, the operators' port."""


def allow_connections(count: int) -> None:
    """Raise the soft limit to fit this many connections, within the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))
        if allowed < needed:
            logger.warning(
                "this process may open %d files, but max_connections needs %d: raise its limit (ulimit -n)",
                max(soft, allowed),
                needed,
            )
