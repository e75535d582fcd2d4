"""What the controllers of a Ray cluster have said, and when: read from the files that Ray keeps."""

from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from tests.cluster.kvasir_command import wait_until


def controller_log(ray_folder: Path, session: str = "session_latest") -> list[str]:
    """Lines, each of which begins with its time. `session` is a pattern: Ray's link to the latest one leads
    nowhere for whoever sees the folder in another place than Ray."""
    files = sorted(ray_folder.glob(f"{session}/logs/worker-*.err"))
    return [line for file in files for line in file.read_text().splitlines() if "cluster.controller" in line]


def wait_said(read: Callable[[], list[str]], text: str, since: float, seconds: float) -> float:
    """When a controller said it, since then for the first time; `read` reads its log."""

    def times() -> list[float]:
        lines = [line for line in read() if text in line]
        said = [datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f").timestamp() for line in lines]
        return [at for at in said if at >= since]

    wait_until(times, lambda: "\n".join(read()[-30:]), seconds)
    return times()[0]
