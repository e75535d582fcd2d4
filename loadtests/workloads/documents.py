"""Conversations about documents whose pages are images, which the users of a tenant share.

Owns the shape of that load test: who asks about which document, how often, and of which pages it is made. The
files of the pages are made in `pages.py`.
"""

import random

from loadtests.workloads.chats import Chats, Turns
from loadtests.workloads.generators import weighted
from loadtests.workloads.pages import PAGE_SIZES
from loadtests.workloads.workload import Message, Workload
from replicas.protocol.media import MAX_IMAGES

KINDS = ("page_tokens", "page_tokens", "page_tokens", "slide_tokens", "table_tokens")
"""Kinds that pages are drawn from."""


def documents(
    *,
    seed: int,
    qps: float = 1.0,
    duration_seconds: float = 60.0,
    num_tenants: int = 2,
    users_per_tenant: int = 8,
    num_documents: int = 16,
    exponent: float = 1.0,
    fewest_pages: int = 4,
    most_pages: int = 12,
    fewest_turns: int = 2,
    most_turns: int = 5,
    system_tokens: int = 64,
    question_tokens: int = 32,
    output_tokens: int = 16,
    think_seconds: float = 4.0,
    page_tokens: int = 94,
    slide_tokens: int = 94,
    table_tokens: int = 57,
) -> Workload:
    """Questions about documents of images, popular ones first, several about one. Sessions start at `qps`.

    All tenants have the same documents, and must share nothing. What a page comes to is the model's: these
    are the numbers of the tiny one that takes images.
    """
    if not fewest_pages <= most_pages <= MAX_IMAGES:
        raise ValueError(
            f"a document has fewest_pages to most_pages, and a request {MAX_IMAGES} images at most,"
            f" not {fewest_pages} to {most_pages}"
        )
    num_tokens = {"page_tokens": page_tokens, "slide_tokens": slide_tokens, "table_tokens": table_tokens}
    chats = Chats("documents", seed, duration_seconds)
    rng = chats.rng
    draw = weighted(rng, [1 / (rank + 1) ** exponent for rank in range(num_documents)])
    for number, start in enumerate(chats.arrivals(qps)):
        tenant, arrival, document = rng.randrange(num_tenants), start, draw()
        user = f"user-{tenant}-{rng.randrange(users_per_tenant)}"
        shape = random.Random(f"{seed}/{document}")  # the same, whoever asks about it
        kinds = shape.choices(KINDS, k=shape.randint(fewest_pages, most_pages))
        messages = [Message("system", "system", system_tokens)]
        for place, kind in enumerate(kinds):
            name = f"document-{document}-{place}"
            messages.append(Message("user", name, num_tokens[kind], PAGE_SIZES[kind]))
        turns = Turns(rng.randint(fewest_turns, most_turns), question_tokens, output_tokens, think_seconds)
        chats.converse(f"{number}", arrival, messages, tenant, user, turns)
    return chats.build()
