"""Many simulated replicas in one process, for measuring routers that know a large fleet.

Owns their number and names. Each is a replica in full, with its server, its lease and its engine thread; only
the process is shared. The router's side of it is real, and what these replicas measure of themselves is not.
"""

import argparse
import asyncio
import signal

from replicas.config import ReplicaConfig
from replicas.host import ReplicaHost


async def serve(count: int, redis_url: str, secret_file: str, model_name: str) -> None:
    """Until SIGTERM."""
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    hosts = [
        ReplicaHost(
            ReplicaConfig(
                replica_id=f"crowd-{number}",
                redis_url=redis_url,
                secret_file=secret_file,
                engine="simulated",
                model_name=model_name,
                num_blocks=256,
            )
        )
        for number in range(count)
    ]
    for host in hosts:
        await host.start()
    await told.wait()
    await asyncio.gather(*(host.stop() for host in hosts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--redis-url", required=True)
    parser.add_argument("--secret-file", required=True)
    parser.add_argument("--model-name", required=True)
    arguments = parser.parse_args()
    asyncio.run(serve(arguments.count, arguments.redis_url, arguments.secret_file, arguments.model_name))


if __name__ == "__main__":
    main()
