"""Generated chats: tenants with users, conversations, agents, retrieved documents, and nothing shared at all.

Owns the shapes of the load tests that talk to a real server as chats. Sizes are for a small model on a small
machine by default. All are seeded, last `duration_seconds`, and start requests (or sessions) at `qps` on
average. Texts are made of them in `chat_bodies.py`.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from loadtests.workloads.generators import Builder, around, exponential, weighted
from loadtests.workloads.workload import ImageSpan, Message, Workload, first_seconds

BLOCK_TOKENS = 16


def cross_user(
    *,
    seed: int,
    qps: float = 4.0,
    duration_seconds: float = 60.0,
    num_tenants: int = 4,
    users_per_tenant: int = 8,
    prompts_per_tenant: int = 2,
    tenants_per_text: int = 2,
    exponent: float = 1.0,
    system_tokens: int = 512,
    question_tokens: int = 48,
    output_tokens: int = 16,
) -> Workload:
    """Tenants whose users share system prompts; some tenants have the same texts and must share nothing."""
    chats = Chats("cross-user", seed, duration_seconds)
    draw = weighted(chats.rng, [1 / (rank + 1) ** exponent for rank in range(num_tenants)])
    for number, arrival in enumerate(chats.arrivals(qps)):
        tenant, user = draw(), chats.rng.randrange(users_per_tenant)
        prompt = chats.rng.randrange(prompts_per_tenant)
        text = f"system-{tenant // tenants_per_text}-{prompt}"
        messages = [Message("system", text, system_tokens)]
        messages.append(Message("user", f"question-{number}", around(chats.rng, question_tokens)))
        chats.add(arrival, messages, output_tokens, tenant, f"user-{tenant}-{user}", f"{number}")
    return chats.build()


def chat(
    *,
    seed: int,
    qps: float = 0.7,
    duration_seconds: float = 60.0,
    num_tenants: int = 2,
    users_per_tenant: int = 8,
    fewest_turns: int = 3,
    most_turns: int = 7,
    system_tokens: int = 256,
    question_tokens: int = 60,
    answer_tokens: int = 32,
    think_seconds: float = 4.0,
) -> Workload:
    """Conversations of several turns; a tenant's share its system prompt. Sessions start at `qps`."""
    chats = Chats("chat", seed, duration_seconds)
    rng = chats.rng
    for number, start in enumerate(chats.arrivals(qps)):
        tenant, arrival = rng.randrange(num_tenants), start
        user = f"user-{tenant}-{rng.randrange(users_per_tenant)}"
        messages = [Message("system", f"system-{tenant}", system_tokens)]
        turns = Turns(rng.randint(fewest_turns, most_turns), question_tokens, answer_tokens, think_seconds)
        chats.converse(f"{number}", arrival, messages, tenant, user, turns)
    return chats.build()


def agent(
    *,
    seed: int,
    qps: float = 0.3,
    duration_seconds: float = 60.0,
    num_tenants: int = 2,
    users_per_tenant: int = 4,
    mean_turns: int = 10,
    tools_tokens: int = 400,
    system_tokens: int = 300,
    task_tokens: int = 80,
    mean_result_tokens: int = 120,
    mean_output_tokens: int = 24,
    tool_seconds: float = 2.0,
    most_tokens: int = 3500,
) -> Workload:
    """Agents: tools and instructions that a tenant shares, then calls and results that add to the prompt.

    As such an agent sends it, every session has a `prompt_cache_key` of its own.
    """
    chats = Chats("agent", seed, duration_seconds)
    rng = chats.rng
    for number, start in enumerate(chats.arrivals(qps)):
        tenant, arrival = rng.randrange(num_tenants), start
        user = f"user-{tenant}-{rng.randrange(users_per_tenant)}"
        messages = [
            Message("tools", "tools", tools_tokens),
            Message("system", f"system-{tenant}", system_tokens),
        ]
        messages.append(Message("user", f"task-{number}", around(rng, task_tokens)))
        for turn in range(1 + exponential(rng, mean_turns - 1)):
            if sum(message.num_tokens for message in messages) > most_tokens:
                break
            num_output = 1 + exponential(rng, mean_output_tokens)
            chats.add(arrival, messages, num_output, tenant, user, f"{number}", key=f"session-{number}")
            messages.append(Message("assistant", f"call-{number}-{turn}", num_output))
            num_result = 1 + exponential(rng, mean_result_tokens)
            messages.append(Message("tool", f"result-{number}-{turn}", num_result))
            arrival += rng.expovariate(1 / tool_seconds)
    return chats.build()


def rag(
    *,
    seed: int,
    qps: float = 3.0,
    duration_seconds: float = 60.0,
    num_tenants: int = 2,
    users_per_tenant: int = 8,
    num_documents: int = 24,
    documents_per_prompt: int = 3,
    exponent: float = 1.0,
    system_tokens: int = 128,
    document_tokens: int = 192,
    question_tokens: int = 32,
    output_tokens: int = 16,
) -> Workload:
    """Questions about a tenant's documents, several in a prompt and in varying order, popular ones first."""
    chats = Chats("rag", seed, duration_seconds)
    rng = chats.rng
    draw = weighted(rng, [1 / (rank + 1) ** exponent for rank in range(num_documents)])
    for number, arrival in enumerate(chats.arrivals(qps)):
        tenant = rng.randrange(num_tenants)
        chosen: list[int] = []
        while len(chosen) < min(documents_per_prompt, num_documents):
            if (document := draw()) not in chosen:
                chosen.append(document)
        messages = [Message("system", f"system-{tenant}", system_tokens)]
        messages += [Message("user", f"document-{tenant}-{each}", document_tokens) for each in chosen]
        messages.append(Message("user", f"question-{number}", around(rng, question_tokens)))
        user = f"user-{tenant}-{rng.randrange(users_per_tenant)}"
        chats.add(arrival, messages, output_tokens, tenant, user, f"{number}")
    return chats.build()


def no_reuse(
    *,
    seed: int,
    qps: float = 3.0,
    duration_seconds: float = 60.0,
    num_tenants: int = 2,
    users_per_tenant: int = 8,
    prompt_tokens: int = 500,
    output_tokens: int = 16,
) -> Workload:
    """The control: no two prompts begin alike, so whatever is cached is a fault."""
    chats = Chats("no-reuse", seed, duration_seconds)
    for number, arrival in enumerate(chats.arrivals(qps)):
        tenant = chats.rng.randrange(num_tenants)
        user = f"user-{tenant}-{chats.rng.randrange(users_per_tenant)}"
        messages = [Message("user", f"prompt-{number}", around(chats.rng, prompt_tokens))]
        chats.add(arrival, messages, output_tokens, tenant, user, f"{number}")
    return chats.build()


def mixed(
    *,
    seed: int,
    qps: float = 4.0,
    duration_seconds: float = 60.0,
    cross_user_share: float = 0.4,
    chat_share: float = 0.2,
    agent_share: float = 0.1,
    rag_share: float = 0.2,
) -> Workload:
    """All of them at once, each with tenants of its own; `qps` counts requests, the shares are of those.

    What the shares leave is no-reuse.
    """
    rest = 1 - cross_user_share - chat_share - agent_share - rag_share
    if rest < -1e-9 or min(cross_user_share, chat_share, agent_share, rag_share) < 0:
        raise ValueError("the shares of a mixed workload are 0 or above and add up to at most 1")
    parts: list[tuple[Callable[..., Workload], float]] = [
        (cross_user, cross_user_share),
        (chat, chat_share / MEAN_CHAT_TURNS),
        (agent, agent_share / MEAN_AGENT_TURNS),
        (rag, rag_share),
        (no_reuse, rest),
    ]
    chats = Chats("mixed", seed, duration_seconds)
    for number, (generate, share) in enumerate(parts):
        if share > 1e-9:
            part = generate(
                seed=seed * len(parts) + number, qps=qps * share, duration_seconds=duration_seconds
            )
            chats.take_over(part)
    return chats.build()


MEAN_CHAT_TURNS = 5
MEAN_AGENT_TURNS = 8
"""Sessions in one workload start slower than their turns come; ends of runs and of contexts cut some off."""


class Turns(NamedTuple):
    """Turns of one conversation: average tokens of questions and answers, and the user's average pause."""

    num_turns: int
    question_tokens: int
    answer_tokens: int
    think_seconds: float


class Chats:
    """Collects the chats of one workload, until its end."""

    def __init__(self, name: str, seed: int, duration_seconds: float) -> None:
        self.rng = random.Random(seed)
        self._name, self._duration = name, duration_seconds
        self._builder = Builder(name, BLOCK_TOKENS)

    def arrivals(self, qps: float) -> list[float]:
        if qps <= 0:
            raise ValueError(f"a rate is above 0, not {qps:g}")
        endless = itertools.accumulate(iter(lambda: self.rng.expovariate(qps), None))
        return list(itertools.takewhile(lambda arrival: arrival < self._duration, endless))

    def add(
        self,
        arrival: float,
        messages: Sequence[Message],
        num_output_tokens: int,
        tenant: int,
        user: str,
        session: str,
        *,
        key: str | None = None,
    ) -> None:
        self._add(arrival, messages, num_output_tokens, f"{self._name}-{tenant}", user, session, key)

    def converse(
        self, session: str, arrival: float, messages: Sequence[Message], tenant: int, user: str, turns: Turns
    ) -> None:
        """A conversation that begins with these messages: each turn sends all before it again."""
        rng, so_far = self.rng, [*messages]
        for turn in range(turns.num_turns):
            so_far.append(Message("user", f"question-{session}-{turn}", around(rng, turns.question_tokens)))
            num_answer = around(rng, turns.answer_tokens)
            self.add(arrival, so_far, num_answer, tenant, user, session)
            so_far.append(Message("assistant", f"answer-{session}-{turn}", num_answer))
            arrival += rng.expovariate(1 / turns.think_seconds)

    def take_over(self, part: Workload) -> None:
        """All of another workload's requests; what they are named by stays theirs."""
        for request in part.requests:
            self._add(
                request.arrival_seconds,
                request.messages,
                request.num_output_tokens,
                request.tenant or part.name,
                f"{part.name}-{request.user}",
                f"{part.name}-{request.session}",
                request.prompt_cache_key,
            )

    def _add(
        self,
        arrival: float,
        messages: Sequence[Message],
        num_output_tokens: int,
        tenant: str,
        user: str,
        session: str,
        key: str | None,
    ) -> None:
        segments = [(f"{tenant}/{each.role}/{each.content}", each.num_tokens) for each in messages]
        self._builder.add(
            arrival,
            segments,
            num_output_tokens,
            user=user,
            session=session,
            key=key,
            tenant=tenant,
            messages=tuple(messages),
            images=_images(messages, tenant),
        )

    def build(self) -> Workload:
        """Turns that would come after the end are left out."""
        return first_seconds(self._builder.build(), self._duration)


def _images(messages: Sequence[Message], tenant: str) -> tuple[ImageSpan, ...]:
    """Return the images' positions in the workload's token count. Each tenant's are different, like its
    prefixes."""
    starts = itertools.accumulate((each.num_tokens for each in messages), initial=0)
    return tuple(
        ImageSpan(f"{tenant}/{each.content}", start, each.num_tokens)
        for each, start in zip(messages, starts, strict=False)
        if each.page is not None
    )
