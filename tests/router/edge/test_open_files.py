"""A router may have as many connections as its settings say, whatever the soft limit of open files is."""

import subprocess
import sys

PROGRAM = """
import logging, resource, sys
from router.edge.open_files import allow_connections
logging.basicConfig(format="%(message)s")
resource.setrlimit(resource.RLIMIT_NOFILE, (64, int(sys.argv[1])))
allow_connections(2000)
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def allowed(hard: int) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, str(hard)], capture_output=True, text=True, check=True
    )


def test_the_soft_limit_is_raised_to_what_the_connections_need() -> None:
    done = allowed(hard=8192)
    assert (done.stdout, done.stderr) == ("3024\n", "")


def test_a_hard_limit_below_that_is_reached_and_said() -> None:
    done = allowed(hard=1500)
    assert done.stdout == "1500\n"
    assert "may open 1500 files, but max_connections needs 3024" in done.stderr


def test_a_router_raises_its_own() -> None:
    """Not only the function: the program, up to its first sentence about itself."""
    code = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 8192))
import router.__main__ as program
program.run_one = lambda *_: print(resource.getrlimit(resource.RLIMIT_NOFILE)[0]) or 0
sys.exit(program.main(["--port=0", "--max-connections=2000"], {}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "3024\n"), done.stderr
