"""A tiny byte-level model for tests: tokenizer trained on the spot, a chat template, a card."""

import functools
import json
from dataclasses import replace

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from replicas.protocol.status import Adapter, ModelCard, ReplicaId, TokenizerBundle
from router.prompt.catalog import ModelCatalog

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
END_OF_TURN = 2
CONTEXT_LENGTH = 512
BLOCK_SIZE = 16
SECRET = b"0123456789abcdef"
MODEL = "tiny"
ADAPTER = Adapter("tiny-sql", "cd" * 16)
ALIAS = "gpt-tiny"
"""Another name of the model."""

TEMPLATE = (
    "{%- if tools %}{{ '<|im_start|>system\n' }}{%- for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "{{ '<|im_end|>\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.content == 'refuse me' %}{{ raise_exception('not this one') }}{%- endif %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)

_TEXT = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
    "Ein naïver Käfer über Århus; русский текст; 日本語のテキスト; 👩‍👩‍👧 emoji 🇩🇰.",
    "def route(request):\n    return min(replicas, key=cost)\n\n",
    "Hello world! Hello again. What is the capital of France? It is Paris.",
]


@functools.cache
def tokenizer_json() -> bytes:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT * 4, trainer)
    return tokenizer.to_str().encode()


def bundle(template: str | None = TEMPLATE) -> TokenizerBundle:
    config: dict[str, object] = {"eos_token": "<|im_end|>"}
    if template is not None:
        config["chat_template"] = template
    return TokenizerBundle(
        {"tokenizer.json": tokenizer_json(), "tokenizer_config.json": json.dumps(config).encode()}
    )


def card(name: str = MODEL, context_length: int = CONTEXT_LENGTH) -> ModelCard:
    return ModelCard(
        name=name,
        fingerprint="ab" * 16,
        engine="scripted",
        block_size=BLOCK_SIZE,
        num_blocks=1024,
        context_length=context_length,
        vocab_size=Tokenizer.from_buffer(tokenizer_json()).get_vocab_size(),
        eos_token_ids=(END_OF_TURN,),
    )


@functools.cache
def catalog() -> ModelCatalog:
    """All tests share it, so it refuses changes."""
    made = new_catalog()
    made.add = made.set_cards = _refuse  # type: ignore[method-assign, assignment]
    return made


def new_catalog() -> ModelCatalog:
    made = ModelCatalog(SECRET)
    made.add(card(), bundle())
    made.add(card("untemplated"), bundle(None))
    made.set_cards(MODEL, [(ReplicaId("r0"), replace(card(), adapters=(ADAPTER,), aliases=(ALIAS,)))])
    return made


def _refuse(*_: object) -> None:
    raise AssertionError("other tests share this catalog: take new_catalog()")
