"""Checks that a router names the true cause of a miss, and its place.

Makes misses in known ways, end to end: new prompts, evicted ones, a killed replica, prompts that another
replica holds (by policy or load), two equal ones at once, leases that expired or broke, deleted files; and
the same conversation under another salt, model or chat template. Each is asked for once more, and `GET
/v1/cache/explain/{id}` is compared with the truth: the leading cause, and its place, which is every token
that could have been read, the replica that had it, and the client's change. `--least` is the required share
of right answers.

    python -m loadtests.benches.causes [--engine torch|simulated|vllm] [--each 100] [--only CAUSE]
"""

import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from loadtests.benches.cause_asker import MODEL, Asker, Explanation, Said
from loadtests.benches.harness import bench_options
from loadtests.figures import print_header
from loadtests.stacks.key_file import write_key_file
from loadtests.stacks.local_stack import local_stack
from replicas.toy_model import checkpoint_directory
from router.caller import Tenant

CHUNK_TOKENS = 32
BLOCK_SIZES = {"torch": 16, "simulated": 16, "vllm": 32}
TOKEN_BYTES = 2560
CHUNK_BYTES = 4096 + CHUNK_TOKENS * TOKEN_BYTES
LONG_TOKENS = 1500
BATCH = 10
LARGE_BATCH = 50
"""Number of repetitions in scenes that take long."""
LEASE_SECONDS = 2
NUM_BUSY = 12
BUSY_TOKENS = 400
NEW_TOKENS = 8
"""First tokens of the other template."""

OTHER_MODEL = "other_model"
OTHER_TEMPLATES = "templates"


def in_batches(
    asker: Asker,
    cause: str,
    each: int,
    between: Callable[[], None],
    batch: int = BATCH,
    *,
    is_elsewhere: bool = False,
    **fields: object,
) -> Said:
    """Prompts are asked for, something happens to all of them, and they are asked for again: of replicas that
    take turns, `is_elsewhere` than the first time. Where that is not so, or where a lease was refused, it is
    no scene.
    """
    said = asker.said(cause)
    while said.num_scenes < each:
        asked: list[tuple[list[int], str | None]] = []
        for _ in range(min(batch, each - said.num_scenes)):
            prompt = asker.tokens()
            holder = _replica(asker.ask(prompt, **fields))
            if not asker.was_lease_refused:
                asked.append((prompt, holder))
        asker.settle()
        between()
        for prompt, holder in asked:
            explanation = asker.ask(prompt)
            if is_elsewhere and _replica(explanation) == holder:
                asker.ask(asker.tokens(1))  # then it is the other's turn
            else:
                said.take(explanation, holder)
    return said


def _replica(explanation: Explanation | None) -> str | None:
    return None if explanation is None else explanation["replica"]


def never_cached(asker: Asker, cause: str, each: int) -> Said:
    said = asker.said(cause)
    for _ in range(each):
        said.take(asker.ask(asker.tokens()))
    return said


def hit(asker: Asker, cause: str, each: int) -> Said:
    return in_batches(asker, cause, each, lambda: None)


def below_a_block(asker: Asker, cause: str, each: int) -> Said:
    said = asker.said(cause)
    for _ in range(each):
        prompt = asker.tokens(asker.rng.randint(2, asker.block_size))
        asker.ask(prompt)
        said.take(asker.ask(prompt))
    return said


def evicted(asker: Asker, cause: str, each: int) -> Said:
    return in_batches(asker, cause, each, lambda: asker.push_out(5000))


def evicted_elsewhere(asker: Asker, cause: str, each: int) -> Said:
    return in_batches(asker, cause, each, lambda: asker.push_out(10_000), is_elsewhere=True)


def replica_restarted(asker: Asker, cause: str, each: int) -> Said:
    def restart() -> None:
        asker.stack.kill("replica-0")
        asker.stack.start("replica-0")
        time.sleep(1.0)
        asker.stack.wait_ready(1)
        asker.ask(asker.tokens(40))
        asker.settle()

    return in_batches(asker, cause, each, restart, LARGE_BATCH)


def not_yet_written(asker: Asker, cause: str, each: int) -> Said:
    """Two equal prompts at once, at two replicas, since the policy takes them in turns: that which was
    decided second."""
    said = asker.said(cause)
    for _ in range(each):
        prompt = asker.tokens(LONG_TOKENS)
        first, second = sorted(
            asker.ask_all([prompt, prompt]),
            key=lambda explanation: explanation is None or explanation["cause"] != "never_cached",
        )
        said.take(second, _replica(first))
    return said


def held_elsewhere(asker: Asker, cause: str, each: int) -> Said:
    """The router's policy takes replicas in turns."""
    said = asker.said(cause)
    for _ in range(each):
        prompt = asker.tokens()
        holder = _replica(asker.ask(prompt))
        asker.settle()
        said.take(asker.ask(prompt), holder)
    return said


def spilled(asker: Asker, cause: str, each: int) -> Said:
    """The replica that has the prompt is busy with long answers, whose own prompt only it has: the policy
    sends the prompt to the other one. Where it does not, that is no scene."""
    said = asker.said(cause)
    busy = asker.tokens(LONG_TOKENS)
    holder = _replica(asker.ask(busy))
    deadline = time.monotonic() + 20.0 * each
    while said.num_scenes < each and time.monotonic() < deadline:
        prompts = [asker.tokens() for _ in range(3 * BATCH)]
        prompts = [prompt for prompt in prompts if _replica(asker.ask(prompt)) == holder]
        asker.settle()
        with asker.busy(busy, NUM_BUSY, BUSY_TOKENS):
            for prompt in prompts[: each - said.num_scenes]:
                explanation = asker.ask(prompt)
                if _replica(explanation) != holder:
                    said.take(explanation, holder)
    return said


def expired(asker: Asker, cause: str, each: int, *, is_elsewhere: bool = False) -> Said:
    def pass_time() -> None:
        time.sleep(LEASE_SECONDS + 0.5)
        asker.push_out(28_000 if is_elsewhere else 14_000)

    lease = {"ttl": f"{LEASE_SECONDS}s"}
    return in_batches(asker, cause, each, pass_time, is_elsewhere=is_elsewhere, prompt_cache_options=lease)


def expired_elsewhere(asker: Asker, cause: str, each: int) -> Said:
    return expired(asker, cause, each, is_elsewhere=True)


def lease_broken(asker: Asker, cause: str, each: int, *, is_elsewhere: bool = False) -> Said:
    """All of host memory is leased: what a longer prompt needs at once, it can only take from that."""
    return in_batches(
        asker,
        cause,
        each,
        lambda: asker.push_out(16_000 if is_elsewhere else 8000, 1900),
        BATCH if is_elsewhere else BATCH // 2,
        is_elsewhere=is_elsewhere,
        prompt_cache_options={"ttl": "5m"},
    )


def lease_broken_elsewhere(asker: Asker, cause: str, each: int) -> Said:
    return lease_broken(asker, cause, each, is_elsewhere=True)


def lost_in_transfer(asker: Asker, cause: str, each: int) -> Said:
    """Lose KV from device and host memory, so that it is on disk alone; then delete its file."""
    folder = asker.stack.run_directory / "kv"

    def wait_for_the_disk() -> None:
        """It has nothing else to do, so it takes what is new."""
        before = None
        while (names := {path.name for path in folder.rglob("*.kv")}) != before:
            before = names
            time.sleep(1.0)

    def lose() -> None:
        wait_for_the_disk()
        asker.push_out(14_000)
        wait_for_the_disk()
        for path in folder.rglob("*.kv"):
            path.unlink()

    return in_batches(asker, cause, each, lose)


def other_salt(asker: Asker, cause: str, each: int) -> Said:
    said = asker.said(cause)
    for _ in range(each):
        chat = asker.chat()
        asker.ask(chat, cache_salt="one")
        said.take(asker.ask(chat, cache_salt="another"), path="cache_salt")
    return said


def other_model(asker: Asker, cause: str, each: int) -> Said:
    said = asker.said(cause)
    for _ in range(each):
        chat = asker.chat()
        asker.ask(chat)
        said.take(asker.ask(chat, model=OTHER_MODEL), path="model")
    return said


def other_template(asker: Asker, cause: str, each: int) -> Said:
    """The replica is replaced by one of the same name and weights whose chat template is another one."""
    said, folder = asker.said(cause), asker.stack.run_directory / OTHER_TEMPLATES
    before = asker.stack.command("replica-0")
    for number in range(-(-each // LARGE_BATCH)):
        chats = [asker.chat() for _ in range(min(LARGE_BATCH, each - said.num_scenes))]
        for chat in chats:
            asker.ask(chat)
        asker.stack.terminate("replica-0")
        checkpoint = with_template(folder / str(number), f"{{{{- 'Answer {number}. ' }}}}\n")
        asker.stack.start("replica-0", [*before, f"--model={checkpoint}"])
        time.sleep(1.0)
        asker.stack.wait_ready(1)
        for chat in chats:
            said.take(asker.ask(chat), path="template", num_new=NEW_TOKENS)
    return said


def with_template(folder: Path, beginning: str) -> Path:
    """Return the toy model, whose chat template begins with something else."""
    shutil.copytree(
        checkpoint_directory(None), folder, ignore=shutil.ignore_patterns("*.py", "corpus", "__*")
    )
    template = folder / "chat_template.jinja"
    template.write_text(beginning + template.read_text())
    return folder


Settings = Mapping[str, object]
NO_SETTINGS: Settings = {}
SMALL: Settings = {"num_blocks": 260}
SMALL_VLLM: Settings = {"num_blocks": 131}
LEASING: Settings = {"host_kv_bytes": 70 * CHUNK_BYTES, "lease_share": 1.0, "chunk_tokens": CHUNK_TOKENS}
LARGE: Settings = {"num_blocks": 2000}
IN_TURNS: Settings = {"policy": "round_robin"}


class Scene(NamedTuple):
    """A scene: the actions, the replicas' settings and number, the router's settings, and the cause if the
    scene has another name."""

    make: Callable[[Asker, str, int], Said]
    own: Settings
    num_replicas: int = 1
    of_router: Settings = NO_SETTINGS
    cause: str | None = None


SCENES: Mapping[str, Scene] = {
    "never_cached": Scene(never_cached, SMALL),
    "hit": Scene(hit, LARGE),
    "below_a_block": Scene(below_a_block, LARGE),
    "evicted": Scene(evicted, SMALL),
    "replica_restarted": Scene(replica_restarted, LARGE),
    "not_yet_written": Scene(not_yet_written, LARGE, 2, IN_TURNS),
    "held_elsewhere": Scene(held_elsewhere, LARGE, 2, IN_TURNS),
    "spilled": Scene(spilled, LARGE, 2, cause="held_elsewhere"),
    "expired": Scene(expired, {**SMALL, **LEASING}),
    "lease_broken": Scene(lease_broken, {**SMALL, **LEASING, "host_kv_bytes": 30 * CHUNK_BYTES}),
    "evicted_elsewhere": Scene(evicted_elsewhere, SMALL, 2, IN_TURNS, "evicted"),
    "expired_elsewhere": Scene(expired_elsewhere, {**SMALL, **LEASING}, 2, IN_TURNS, "expired"),
    "lease_broken_elsewhere": Scene(
        lease_broken_elsewhere,
        {**SMALL, **LEASING, "host_kv_bytes": 30 * CHUNK_BYTES},
        2,
        IN_TURNS,
        "lease_broken",
    ),
    "lost_in_transfer": Scene(lost_in_transfer, {**SMALL, **LEASING, "disk_kv_bytes": 20_000 * CHUNK_BYTES}),
    "other_salt": Scene(other_salt, LARGE, cause="other_namespace"),
    "other_model": Scene(other_model, LARGE, 2, cause="other_namespace"),
    "other_template": Scene(other_template, LARGE, cause="other_namespace"),
}


@contextmanager
def scene(name: str, engine: str) -> Iterator[Asker]:
    _, own, num_replicas, of_router, _ = SCENES[name]
    if engine == "vllm" and own.get("num_blocks") == SMALL["num_blocks"]:
        own = {**own, **SMALL_VLLM}
    folder = Path(tempfile.mkdtemp(prefix="kvasir-causes-"))
    settings: dict[str, object] = {
        "engine": engine,
        "model_name": MODEL,
        "context_length": 2048,
        "index_stride": CHUNK_TOKENS,
        **own,
    }
    if engine != "simulated":
        settings |= {"num_threads": 1, "device": "cpu"}
    if "disk_kv_bytes" in own:
        settings["kv_folder"] = folder / "kv"
    key = write_key_file(folder / "keys.json", [Tenant(name="asker")], operators=["asker"])["asker"]
    each = [settings] * num_replicas
    if name == "other_model":
        each[1] = {**settings, "model_name": OTHER_MODEL}
    try:
        with local_stack(
            replica_settings=each,
            router_settings={"index_stride": CHUNK_TOKENS, "keys_file": folder / "keys.json", **of_router},
        ) as stack:
            if "disk_kv_bytes" in own:
                (stack.run_directory / "kv").symlink_to(folder / "kv")
            asker = Asker(stack, key, BLOCK_SIZES[engine], seed=len(name))
            yield asker
            asker.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def what_is_said(name: str, engine: str, each: int) -> Said:
    """Explain misses that were made in one way."""
    with scene(name, engine) as asker:
        return SCENES[name].make(asker, SCENES[name].cause or name, each)


def main() -> None:
    options = bench_options(__doc__)
    options.add_argument("--engine", default="torch", choices=sorted(BLOCK_SIZES))
    options.add_argument("--each", type=int, default=100)
    options.add_argument("--least", type=float, default=0.99)
    options.add_argument("--only", nargs="*", choices=sorted(SCENES))
    arguments = options.parse_args()
    print_header(f"Causes of misses that were made in known ways, {arguments.each} each, {arguments.engine}")
    print("  scene               place   cause   of")
    wrong = []
    for name in arguments.only or SCENES:
        said = what_is_said(name, arguments.engine, arguments.each)
        others = ", ".join(f"{num} {other}" for other, num in said.causes.items() if other != said.cause)
        num_right = said.causes[said.cause]
        print(f"  {name:<18} {said.num_places:>6}  {num_right:>6} {said.num_scenes:>4}  {others}", flush=True)
        for each in said.wrong:
            print(f"    {each}", flush=True)
        if said.share < arguments.least:
            wrong.append(name)
    if wrong:
        sys.exit(f"not named often enough: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
