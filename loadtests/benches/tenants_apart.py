"""Tests whether a tenant can tell from TTFT what another tenant has sent.

A real router with keys over a replica of our own engine with the toy model. For each probe a *victim* sends a
new prompt; then a *prober* sends that prompt and another new one, in random order, and times both. If the two
samples differ by more than chance, by the two-sample Kolmogorov-Smirnov test, the prober learns something. A
prober of the victim's own tenant must see a difference: otherwise the bench could not detect a hit.

With `--pictures` the replica is vLLM with a model that takes images: prompts differ in their picture alone.

    python -m loadtests.benches.tenants_apart [--probes 200] [--words 300]
    python -m loadtests.benches.tenants_apart --pictures DIRECTORY    of replicas.toy_model.make_image_model
"""

import base64
import http.client
import json
import math
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from loadtests.benches.harness import bench_options
from loadtests.figures import percentiles, print_header
from loadtests.stacks.key_file import write_key_file
from loadtests.stacks.local_stack import LocalStack, local_stack
from replicas.media.probes import probe_png
from router.caller import Tenant

MODEL = "toy"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
PICTURE_SIDES = 300, 200

Content = str | list[dict[str, object]]
"""Content of a user's message."""


@dataclass
class Samples:
    """Seconds to the first token: of the victim's prompts, and of new ones."""

    sent: list[float] = field(default_factory=list)
    unsent: list[float] = field(default_factory=list)
    num_cached_tokens: int = 0


class Prober:
    def __init__(self, stack: LocalStack, key: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", stack.port, timeout=60)
        self._headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}

    def ask(self, content: Content) -> tuple[float, int]:
        """Seconds to the first token of the answer, and cached tokens."""
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 2,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        started = time.perf_counter()
        self._connection.request("POST", "/v1/chat/completions", json.dumps(body), self._headers)
        response = self._connection.getresponse()
        assert response.status == 200, response.read()
        response.readline()
        seconds = time.perf_counter() - started
        chunks = [line[6:] for line in response.read().splitlines() if line.startswith(b"data: {")]
        usage = json.loads(chunks[-1])["usage"]
        return seconds, usage["prompt_tokens_details"]["cached_tokens"]


def kolmogorov_smirnov(one: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """Return the largest distance of the two distributions, and how likely one as large is by chance:
    asymptotic, as in Numerical Recipes (Press et al., 3rd edition, section 14.3.3)."""
    places = sorted({*one, *other})
    ordered = sorted(one), sorted(other)
    distance, counts = 0.0, [0, 0]
    for place in places:
        for sample in (0, 1):
            while counts[sample] < len(ordered[sample]) and ordered[sample][counts[sample]] <= place:
                counts[sample] += 1
        distance = max(distance, abs(counts[0] / len(one) - counts[1] / len(other)))
    size = math.sqrt(len(one) * len(other) / (len(one) + len(other)))
    scaled = (size + 0.12 + 0.11 / size) * distance
    terms = (2 * (-1) ** (k - 1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, 101))
    return distance, 1.0 if scaled < 0.2 else min(1.0, max(0.0, sum(terms)))


def new_text(rng: random.Random, num_words: int) -> str:
    return " ".join("".join(rng.choices(LETTERS, k=rng.randint(2, 7))) for _ in range(num_words))


def new_picture(rng: random.Random) -> Content:
    content = base64.b64encode(probe_png(*PICTURE_SIDES, rng.randbytes(3))).decode()
    url = f"data:image/png;base64,{content}"
    picture: dict[str, object] = {"type": "image_url", "image_url": {"url": url}}
    return [picture, {"type": "text", "text": "What is this?"}]


def probe(
    rng: random.Random, victim: Prober, prober: Prober, new: Callable[[], Content], samples: Samples
) -> None:
    sent, unsent = new(), new()
    victim.ask(sent)
    kinds = [(sent, samples.sent), (unsent, samples.unsent)]
    rng.shuffle(kinds)
    for asked, times in kinds:
        seconds, num_cached_tokens = prober.ask(asked)
        times.append(seconds)
        samples.num_cached_tokens += num_cached_tokens


def tell(who: str, samples: Samples) -> None:
    distance, chance = kolmogorov_smirnov(samples.sent, samples.unsent)
    sent, unsent = percentiles(samples.sent).p50, percentiles(samples.unsent).p50
    print(
        f"{who:34} {sent * 1e3:8.2f} {unsent * 1e3:8.2f} {sent / unsent:7.3f} {distance:7.3f} {chance:9.2g}"
        f" {samples.num_cached_tokens:8}"
    )


def main() -> None:
    options = bench_options(__doc__)
    options.add_argument("--probes", type=int, default=200, help="how often each prober asks for either")
    options.add_argument("--words", type=int, default=300, help="length of a prompt")
    options.add_argument("--pictures", type=Path, help="a model that takes images, for vLLM")
    options.add_argument("--seed", type=int, default=1)
    arguments = options.parse_args()
    print_header("tenants apart")
    rng = random.Random(arguments.seed)
    settings = {"model_name": MODEL, "num_threads": 1, "host_kv_bytes": 64 * 2**20}
    new: Callable[[], Content] = partial(new_text, rng, arguments.words)
    if arguments.pictures is None:
        settings |= {"engine": "torch"}
    else:
        settings |= {"engine": "vllm", "model": arguments.pictures.absolute(), "context_length": 2048}
        new = partial(new_picture, rng)
    with tempfile.TemporaryDirectory() as folder:
        keys_file = Path(folder) / "keys.json"
        keys = write_key_file(keys_file, [Tenant(name="victim"), Tenant(name="stranger")])
        with local_stack(replica_settings=settings, router_settings={"keys_file": keys_file}) as stack:
            victim, stranger, own = (Prober(stack, keys[name]) for name in ("victim", "stranger", "victim"))
            strangers, owns = Samples(), Samples()
            for _ in range(10):
                probe(rng, victim, stranger, new, Samples())
            for _ in range(arguments.probes):
                probe(rng, victim, stranger, new, strangers)
                probe(rng, victim, own, new, owns)
    print(f"{'TTFT p50, ms':34} {'sent':>8} {'unsent':>8} {'ratio':>7} {'KS':>7} {'chance':>9} {'cached':>8}")
    tell("prober of another tenant", strangers)
    tell("prober of the victim's own tenant", owns)


if __name__ == "__main__":
    main()
