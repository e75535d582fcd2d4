"""`ray start`, with a raylet that is told its dashboard agent's port.

Ray 2.60 gives the raylet all ports of its agents except this one. The raylet then waits at most 15 s for the
agent to write it to a file, and ends if that takes longer, as on a busy machine.
"""

import sys
from collections.abc import Sequence
from typing import Any

from ray._private import services
from ray.scripts import scripts

FLAG = "--dashboard-agent-listen-port"


def main() -> None:
    port = sys.argv[sys.argv.index(FLAG) + 1]
    start: Any = services.start_ray_process

    def start_process(command: Sequence[str], process_type: str, **options: Any) -> Any:
        if process_type == "raylet":
            command = [*command, f"--dashboard_agent_listen_port={port}"]
        return start(command, process_type, **options)

    services.start_ray_process = start_process  # type: ignore[assignment]
    scripts.main()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
