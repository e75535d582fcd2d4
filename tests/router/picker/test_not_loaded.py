"""A router that is no gateway's picker loads nothing of it."""

import subprocess
import sys


def test_a_router_without_a_picker_port_does_not_load_the_picker() -> None:
    code = (
        "import random, sys\n"
        "from router.assembly import Router\n"
        "from router.config import RouterConfig\n"
        "import router.__main__\n"
        "router = Router(RouterConfig(), rng=random.Random())\n"
        "assert router.picker is None\n"
        "print([name for name in sys.modules if 'picker' in name or name == 'router.dispatch.pick'])\n"
    )
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"
