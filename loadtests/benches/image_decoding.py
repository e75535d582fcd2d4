"""Whether an engine's steps wait for the images that are decoded beside it.

A real router over two vLLM replicas with a model that takes images. One of them gives a long answer. Images
are sent to replicas as routers do, without a prompt that needs them: they are decoded, and no engine has any
other work of it. In turns nothing is sent; or they are sent to the *other* replica, which takes the same
processor time outside the process; or to the one that answers. What the last is worse by than the second is
what decoding in the engine's process costs its steps.

    python -m loadtests.benches.image_decoding DIRECTORY [--rounds 5] [--seconds 6]

DIRECTORY is of replicas.toy_model.make_image_model.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from loadtests.figures import percentiles, print_header
from loadtests.stacks.local_stack import LocalStack, local_stack
from loadtests.workloads.worst_images import png_bomb, png_of_noise
from replicas.media.probes import probe_png
from replicas.protocol.blocks import HASH_BYTES, BlockHash
from replicas.protocol.images import media_hash
from router.fleet.image_traffic import ImageTraffic
from router.fleet.media_uploads import MediaUploads, UploadFailed
from router.fleet.replica_channel import ReplicaChannel
from router.prompt.images import Media

MODEL = "toy"
ROOT = BlockHash(b"r" * HASH_BYTES)
REPLICAS = ("replica-0", "replica-1")

PICTURES: dict[str, Callable[[], bytes]] = {
    "300 x 200, one colour": lambda: probe_png(300, 200, b"\1\2\3"),
    "1,400 x 1,400, noise": lambda: png_of_noise(1408**2),
    "5,700 x 5,700, a bomb": lambda: png_bomb(0),
    "5,700 x 5,700, cut off": lambda: png_bomb(0)[:-64],
}


class Stream:
    """A long answer: from which replica it comes, and the seconds between its pieces."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.gaps: list[float] = []
        self.replica = ""

    async def run(self) -> None:
        body = {"model": MODEL, "prompt": "hello", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        content = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        while True:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            writer.write(head.encode() + b"content-length: %d\r\n\r\n" % len(content) + content)
            answered = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            (self.replica,) = [
                line.split(": ")[1] for line in answered if line.startswith("x-kvasir-replica:")
            ]
            last = None
            while await reader.read(65536):
                now = time.perf_counter()
                if last is not None:
                    self.gaps.append(now - last)
                last = now
            writer.close()


async def send(uploads: MediaUploads, content: bytes, numbers: Iterator[int], count: list[int]) -> None:
    """One after another, each another one, until cancelled."""
    while True:
        image = content + next(numbers).to_bytes(8, "big")
        with contextlib.suppress(UploadFailed):  # what cannot be read was decoded as far as it can be
            await uploads.send(ROOT, [Media(media_hash(ROOT, image), image)])
        count[0] += 1


async def run(stack: LocalStack, options: argparse.Namespace) -> None:
    stream = Stream(stack.port)
    task = asyncio.create_task(stream.run())
    channels = {
        name: ReplicaChannel(stack.replica_address(MODEL, name), None, stack.router_caller(MODEL, name))
        for name in REPLICAS
    }
    uploads = {name: MediaUploads(channel, ImageTraffic()) for name, channel in channels.items()}
    numbers = itertools.count()
    await asyncio.sleep(5.0)
    print("| images | sent to | images a second | gap p50 | p99 | longest |\n|---|---|---|---|---|---|")
    for name, picture in PICTURES.items():
        content = picture()
        gaps: dict[str, list[float]] = {"nobody": [], "the other": [], "the one that answers": []}
        counts = {kind: [0] for kind in gaps}
        for kind in list(gaps) * options.rounds:
            if kind == "nobody":
                sending = asyncio.create_task(asyncio.sleep(3600))
            else:
                mine = stream.replica if kind == "the one that answers" else _other(stream.replica)
                sending = asyncio.create_task(send(uploads[mine], content, numbers, counts[kind]))
            await asyncio.sleep(0.5)
            stream.gaps.clear()
            before = counts[kind][0]
            await asyncio.sleep(options.seconds)
            gaps[kind] += stream.gaps
            counts[kind].append(counts[kind][0] - before)
            sending.cancel()
            await asyncio.wait([sending])
            await asyncio.sleep(1.0)  # for what is still being decoded
        for kind, seconds in gaps.items():
            rate = sum(counts[kind][1:]) / options.rounds / options.seconds
            found = percentiles(seconds)
            print(
                f"| {name} | {kind} | {rate:.1f} | {found.p50 * 1e3:.1f} ms | {found.p99 * 1e3:.1f} ms"
                f" | {max(seconds) * 1e3:.0f} ms |",
                flush=True,
            )
    task.cancel()
    for channel in channels.values():
        await channel.close()


def _other(replica: str) -> str:
    return REPLICAS[1 - REPLICAS.index(replica)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6.0)
    options = parser.parse_args()
    print_header("images that are decoded beside an engine")
    settings = {
        "engine": "vllm",
        "model_name": MODEL,
        "model": options.directory.absolute(),
        "num_threads": 1,
    }
    with local_stack(num_replicas=2, replica_settings=settings) as stack:
        asyncio.run(run(stack, options))


if __name__ == "__main__":
    main()
