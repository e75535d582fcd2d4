"""Held: what vLLM servers hold by their own events, next to what the index says of their replicas.

Owns the reading of events, under our names of blocks, and their history. The names are worked out here from
the tokens in the events, apart from what replicas do.
"""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

import msgspec
import redis
import zmq

from loadtests.benches.harness import counters
from loadtests.benches.peers import Server
from loadtests.stacks.local_stack import LocalStack
from loadtests.stacks.vllm_server import BLOCK_SIZE, MODEL
from replicas.checkpoints.weights import tokenizer_bundle
from replicas.kvcache.hash_map import root_in
from replicas.process.secret_file import read_secret
from replicas.protocol.blocks import BlockHash, Namespace, hash_blocks, namespace_root
from replicas.protocol.keys import BLOCKS_MARKER, blocks_key, replica_key
from replicas.protocol.status import Epoch, ReplicaId
from replicas.remote_engine.facts import declared_fingerprint
from replicas.toy_model import toy_model_path

LATE_SECONDS = 30.0
"""How long the index may take to say what the servers hold."""


class Change(NamedTuple):
    """A block stored (+1) or removed (-1): when, in which batch, by which request."""

    at: float
    batch: int
    copies: int
    request: str = ""


class Held(threading.Thread):
    """The blocks that a server holds under a salt of ours."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt_string(zmq.SUBSCRIBE, "")
        self._socket.connect(f"tcp://127.0.0.1:{server.events_port}")
        self._lock = threading.Lock()
        self._names: dict[int, tuple[BlockHash, BlockHash]] = {}
        """Root and name by the server's hash."""
        self._copies: Counter[int] = Counter()
        self._expected = 0
        self.history: defaultdict[BlockHash, list[Change]] = defaultdict(list)
        self.num_removed = self.num_missed = 0
        self.start()

    def run(self) -> None:
        while True:
            *_, number, payload = self._socket.recv_multipart()
            batch = int.from_bytes(number)
            with self._lock:
                if batch < self._expected:  # the server was started anew
                    self._copies.clear()
                    self._expected = 0
                self.num_missed += batch - self._expected
                self._expected = batch + 1
                for event in msgspec.msgpack.decode(payload)[1]:
                    self._apply(event, batch)

    def _apply(self, event: dict[str, Any], batch: int) -> None:
        match event["type"]:
            case "BlockStored":
                self._stored(event, batch)
            case "BlockRemoved":
                for theirs in event["block_hashes"]:
                    self.num_removed += 1
                    if self._copies[theirs]:
                        self._count(theirs, Change(time.monotonic(), batch, -1))
            case "AllBlocksCleared":
                self._copies.clear()

    def _stored(self, event: dict[str, Any], batch: int) -> None:
        above = event.get("parent_block_hash")
        if above is None:
            root, parent = root_in((event.get("extra_keys") or [None])[0]), None
        else:
            root, parent = self._names.get(above, (None, None))
        if root is None:
            return  # another client's
        names = hash_blocks(root, event["token_ids"], BLOCK_SIZE, parent=parent)
        for theirs, name in zip(event["block_hashes"], names, strict=True):
            self._names[theirs] = root, name
            self._count(theirs, Change(time.monotonic(), batch, 1, event.get("session_id") or ""))

    def _count(self, theirs: int, change: Change) -> None:
        self._copies[theirs] += change.copies
        self.history[self._names[theirs][1]].append(change)

    def died(self) -> None:
        with self._lock:
            self._copies.clear()

    def blocks(self, root: BlockHash) -> set[BlockHash]:
        with self._lock:
            named = [self._names[theirs] for theirs, copies in self._copies.items() if copies]
            return {name for its_root, name in named if its_root == root}


@cache
def root_of(own: LocalStack) -> BlockHash:
    """Return the root of prompts without tenant and salt; proofs have roots of their own."""
    secret = read_secret(None, str(own.secret_file))
    assert secret is not None
    path = toy_model_path()
    fingerprint = declared_fingerprint(str(path), tokenizer_bundle(path).files)
    return namespace_root(secret.current, Namespace(bytes.fromhex(fingerprint), BLOCK_SIZE))


def indexed(own: LocalStack, number: int) -> set[bytes]:
    """Return the blocks of a replica in the index; none without a lease."""
    replica_id = ReplicaId(f"replica-{number}")
    with redis.Redis.from_url(own.redis_url, protocol=2) as client:
        epoch = client.hget(replica_key(MODEL, replica_id), "epoch")
        if not isinstance(epoch, bytes):
            return set()
        members: Any = client.smembers(blocks_key(MODEL, replica_id, Epoch(epoch.decode())))
        return set(members) - {BLOCKS_MARKER}


def differences(own: LocalStack, held: Sequence[Held]) -> list[str]:
    """Compare Redis with the servers, block by block, and the router with Redis in their number."""
    found = []
    root, num_entries = root_of(own), 0
    for number, each in enumerate(held):
        index, blocks = indexed(own, number), each.blocks(root)
        num_entries += len(index)
        if index != blocks:
            found.append(
                f"replica-{number} lacks {len(blocks - index)} blocks, has {len(index - blocks)} more"
            )
    of_router = counters([own.url], "router_index_entries").total()
    if of_router != num_entries:
        found.append(f"the router knows {of_router} blocks, Redis {num_entries}")
    return found


def until_equal(own: LocalStack, held: Sequence[Held]) -> tuple[float, list[str]]:
    """Wait until the index says what the servers hold. Returns the time that it took, 0 for a first look, and
    what differs still."""
    began, seconds = time.monotonic(), 0.0
    while (found := differences(own, held)) and seconds < LATE_SECONDS:
        time.sleep(0.05)
        seconds = time.monotonic() - began
    return seconds, found


def print_index(own: LocalStack, held: Sequence[Held]) -> None:
    seconds, found = until_equal(own, held)
    blocks = " + ".join(str(len(each.blocks(root_of(own)))) for each in held)
    missed = sum(each.num_missed for each in held)
    said = "; ".join(found) or f"equal after {seconds:.1f} s"
    print(f"  index and the {blocks} blocks of the servers: {said}" + f"; missed {missed}" * bool(missed))


def lines_of(held: Held, names: Iterable[BlockHash], first: int, sent: float) -> list[str]:
    """Return the history of blocks of a chain, whose first one is the `first`; times are from the sending
    on."""
    found = []
    for at, name in enumerate(names, first):
        changes = [
            f"{'stored' if each.copies > 0 else 'removed'} in batch {each.batch} at {each.at - sent:+.3f} s"
            + f" by {each.request}" * bool(each.request)
            for each in held.history[name]
        ]
        found.append(f"    block {at}: {'; '.join(changes) or 'never stored'}")
    return found
