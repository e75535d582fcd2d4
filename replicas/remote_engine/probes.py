"""Probes of a server: which dialect it speaks, and whether its tokenizer makes the tokens that ours makes.

Owns the questions and the texts. Prompts go as tokens, so the server's chat template does not matter; another
vocabulary under the same name would answer nonsense, and nothing would look broken.
"""

import json
import logging
from typing import Any

from replicas.checkpoints.tokenizer import read_tokenizer
from replicas.errors import StartupError
from replicas.protocol.status import TokenizerBundle
from replicas.remote_engine.dialect import Ask, Dialect, NotThere
from replicas.remote_engine.facts import tokens_of
from replicas.remote_engine.model_list import MODELS_PATH, read_models
from replicas.remote_engine.refusals import in_one_line
from replicas.remote_engine.sglang_dialect import read_sglang
from replicas.remote_engine.vllm_dialect import read_vllm

logger = logging.getLogger(__name__)

TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "  leading, trailing and   inner   spaces  ",
    "tabs\tand\nlines\r\n\n\nand an end\n",
    "0123456789 3.14159 1,000,000 0xdeadbeef -17e-3",
    'def f(x: int) -> str:\n    return f"{x!r:>10}"  # code\n',
    '{"name": "value", "list": [1, 2.5, null, true], "nested": {"a": "\\u00e9"}}',
    "<html><body class='a'>&amp; &lt;tag&gt;</body></html>",
    "Ünïcödé, naïve façade, Straße, ŁÓDŹ, İstanbul",
    "Привет, мир! Γειά σου Κόσμε. שלום עולם. مرحبا بالعالم",
    "你好，世界。こんにちは世界。안녕하세요 세계",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇺🇳 ❤️ \u200b\u00a0\ufeff",
    "https://example.org/a/b?c=d&e=f#g someone@example.org C:\\path\\file.txt",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "I'm you're he'd we'll they've it's don't DON'T",
    "SELECT * FROM t WHERE a <> 'b' AND c >= 10; -- query",
    "\\frac{a}{b} = \\sum_{i=0}^{n} x_i^2 \\quad \\forall n \\in \\mathbb{N}",
)


def find_dialect(
    ask: Ask, url: str, *, rank: int | None, served_name: str | None = None, block_size: int | None = None
) -> Dialect:
    """Ask the server what it is. SGLang describes itself with its cache's size, vLLM in its metrics; what has
    neither is no server that we can speak to. Raises StartupError."""
    model = read_models(ask(MODELS_PATH, None), served_name)
    if model.is_router:
        raise StartupError(
            "it is a router of Kvasir: join the servers behind it, or this one with --engine openai"
        )
    if model.context_length is None:
        raise StartupError(f"the server does not say how long a context {model.served_name} has")
    info = server_info(ask)
    if info is not None:
        return read_sglang(info, model, url, rank=rank, block_size=block_size)
    sources = _maybe(ask, "/kv_event_sources")
    dialect = read_vllm(ask("/metrics", None), sources, model, url, rank)
    if sources is None:
        version = in_one_line((_maybe(ask, "/version") or b"unknown").decode(errors="replace"))[:100]
        logger.warning("vLLM says where its cache events go from 0.31 on, and the server is %s", version)
    return dialect


def server_info(ask: Ask) -> dict[str, Any] | None:
    """Return SGLang's description of itself; None if the server is no SGLang."""
    text = _maybe(ask, "/server_info")
    try:
        info = None if text is None else json.loads(text)
    except ValueError:
        return None
    return info if isinstance(info, dict) and "max_total_num_tokens" in info else None


def _maybe(ask: Ask, path: str) -> bytes | None:
    try:
        return ask(path, None)
    except NotThere:
        return None


def check_tokenizer(ask: Ask, served_name: str, bundle: TokenizerBundle) -> None:
    """Compare texts at the server's `/tokenize` with ours. Raises StartupError with the first difference, and
    CheckpointError for files that cannot be read."""
    tokenizer = read_tokenizer(bundle)
    if tokenizer is None:
        raise StartupError("the model's folder has no tokenizer.json, by which routers make prompts")
    for text in TEXTS:
        body: dict[str, object] = {"model": served_name, "prompt": text, "add_special_tokens": False}
        theirs = tokens_of(ask("/tokenize", body))
        ours = list(tokenizer.encode(text, add_special_tokens=False).ids)
        if theirs != ours:
            place = next(
                (at for at, pair in enumerate(zip(theirs, ours, strict=False)) if pair[0] != pair[1]),
                min(len(theirs), len(ours)),
            )
            raise StartupError(
                f"the server's tokenizer is another than that of the model's folder: token {place} of"
                f" {text!r} is {_at(theirs, place)} there and {_at(ours, place)} here"
            )


def _at(tokens: list[int], place: int) -> str:
    return str(tokens[place]) if place < len(tokens) else "missing"
