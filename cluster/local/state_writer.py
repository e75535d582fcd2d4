"""StateWriter: writes the state files of `kvasir up`, also across a full disk.

Owns what the files should contain, and whether they do. A full disk is reported once, and the files are
written when there is room again.
"""

import asyncio
from collections.abc import Callable

from cluster.local.run_directory import ClusterState, RunDirectory
from cluster.local.scrape_targets import scrape_targets

RETRY_SECONDS = 1.0


class StateWriter:
    def __init__(self, directory: RunDirectory, say: Callable[[str], None]) -> None:
        self._directory = directory
        self._say = say
        self._state: ClusterState | None = None
        self._is_behind = False

    def write(self, state: ClusterState) -> None:
        self._state = state
        try:
            self._directory.write_state(state)
            self._directory.write_targets(scrape_targets(state))
        except OSError as error:
            if not self._is_behind:
                self._say(
                    f"cannot write to {self._directory.path} ({error.strerror}); the cluster goes on, but"
                    " other commands and Prometheus see an old state"
                )
            self._is_behind = True
            return
        if self._is_behind:
            self._say(f"{self._directory.path} is writable again")
        self._is_behind = False

    async def keep(self) -> None:
        """Retry failed writes; until cancelled."""
        while True:
            await asyncio.sleep(RETRY_SECONDS)
            if self._is_behind and self._state is not None:
                self.write(self._state)
