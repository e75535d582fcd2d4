"""Makes the toy model: a tokenizer and a Llama of 1.5 million parameters, from the texts in `corpus/`.

It is a toy. It answers a few hundred simple questions in readable English, so that a first request to
Kvasir returns words and not noise; to everything else it says that it does not know. It greets people by
name but does not recall the name a turn later, and it is no measure of anything.

To make it again, in a checkout with the development dependencies (two CPU cores are enough)::

    python -m replicas.toy_model.train_toy_model              # writes into replicas/toy_model
    python -m replicas.toy_model.train_toy_model --help

The files that are checked in took 17 minutes on two cores that were busy with other work, at a loss of
0.036 nats per token of the answers, 1,492,352 parameters. The same seed gives the same dialogues and the
same tokenizer; the weights also depend on the machine, on its number of threads and on the torch version.

Owns the training and the files of the checkpoint. What the model is taught to say is in `corpus/` and
`dialogues.py`.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

from replicas.toy_model import toy_model_path
from replicas.toy_model.corpus_texts import load_corpus
from replicas.toy_model.dialogues import Dialogues

END_OF_TEXT, TURN_START, TURN_END = SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_OF_TEXT_ID, TURN_START_ID, TURN_END_ID = range(3)
VOCAB_SIZE = 2048
CONTEXT_LENGTH = 8192
WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

MATRIX_LEARNING_RATE = 1e-2
OTHER_LEARNING_RATE = 6e-3
WARMUP_STEPS = 40
READ_WEIGHT = 0.05
"""Loss weight of tokens that the model only reads; those that it writes weigh 1."""

MODEL_SETTINGS: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": CONTEXT_LENGTH,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
    "bos_token_id": None,
    "eos_token_id": TURN_END_ID,
    "pad_token_id": END_OF_TEXT_ID,
}
ROPE_THETA = 10_000.0


@dataclass(frozen=True, slots=True)
class Phase:
    """A number of steps on batches of one shape, with system prompts of up to a number of words."""

    num_steps: int
    num_rows: int
    row_length: int
    max_system_words: int


SHORT_PHASE = Phase(num_steps=800, num_rows=12, row_length=320, max_system_words=60)
MIXED_PHASES = (
    Phase(num_steps=450, num_rows=12, row_length=320, max_system_words=60),
    Phase(num_steps=220, num_rows=3, row_length=1536, max_system_words=900),
    Phase(num_steps=36, num_rows=1, row_length=4096, max_system_words=2400),
    Phase(num_steps=12, num_rows=1, row_length=CONTEXT_LENGTH, max_system_words=4500),
)


@dataclass(frozen=True, slots=True)
class Row:
    token_ids: list[int]
    weights: list[float]


def train_tokenizer(dialogues: Dialogues) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [*dialogues.corpus.texts(), *(message.text for message in dialogues.turns(500))]
    tokenizer.train_from_iterator(texts, trainer)
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2]
    return tokenizer


@dataclass(frozen=True, slots=True)
class RowMaker:
    """Dialogues as rows of token ids, each token with its weight in the loss."""

    tokenizer: Tokenizer
    dialogues: Dialogues

    def row(self, phase: Phase) -> Row:
        token_ids: list[int] = []
        weights: list[float] = []
        pieces = self._prose() if self.dialogues.rng.random() < 0.05 else self._chat(phase)
        for piece_ids, weight in pieces:
            token_ids.extend(piece_ids)
            weights.extend([weight] * len(piece_ids))
            if len(token_ids) > phase.row_length:
                break
        return Row(token_ids[: phase.row_length], weights[: phase.row_length])

    def _prose(self) -> Iterator[tuple[list[int], float]]:
        while True:
            for _ in range(self.dialogues.rng.randint(1, 3)):
                yield self._encode(self.dialogues.prose() + "\n\n"), 1.0
            yield [END_OF_TEXT_ID], 1.0

    def _chat(self, phase: Phase) -> Iterator[tuple[list[int], float]]:
        rng = self.dialogues.rng
        if rng.random() < 0.7:
            is_long = rng.random() < 0.5
            num_words = rng.randint(3, phase.max_system_words if is_long else 30)
            text_ids = self._encode(self.dialogues.system_text(num_words))[: phase.row_length * 3 // 4]
            yield from self._message("system", text_ids)
        while True:
            for message in self.dialogues.turns(64):
                yield from self._message(message.role, self._encode(message.text))

    def _message(self, role: str, text_ids: list[int]) -> Iterator[tuple[list[int], float]]:
        yield [TURN_START_ID, *self._encode(f"{role}\n")], READ_WEIGHT
        yield [*text_ids, TURN_END_ID], 1.0 if role == "assistant" else READ_WEIGHT
        yield self._encode("\n"), READ_WEIGHT

    def _encode(self, text: str) -> list[int]:
        token_ids: list[int] = self.tokenizer.encode(text).ids
        return token_ids


def make_schedule(scale: float, rng: random.Random) -> list[Phase]:
    """Return the phase of each step: short rows first, then all lengths mixed, so that nothing is
    forgotten."""

    def repeated(phase: Phase) -> list[Phase]:
        return [phase] * max(1, round(phase.num_steps * scale))

    mixed = [step for phase in MIXED_PHASES for step in repeated(phase)]
    rng.shuffle(mixed)
    return repeated(SHORT_PHASE) + mixed


def learning_rate_factor(step: int, num_steps: int) -> float:
    """Linear warm-up, then half a cosine."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / max(1, num_steps - WARMUP_STEPS)
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress))


def make_optimizers(model: LlamaForCausalLM) -> tuple[torch.optim.Optimizer, ...]:
    """Muon for the matrices inside the layers, which needs fewer steps here; AdamW for the rest."""
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_inner_matrix = parameter.ndim == 2 and "embed" not in name
        (matrices if is_inner_matrix else others).append(parameter)
    return (
        torch.optim.Muon(
            matrices, lr=MATRIX_LEARNING_RATE, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(others, lr=OTHER_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    )


def batch_loss(model: LlamaForCausalLM, rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """The weighted loss that is trained, and the plain one of the answers alone, which can be read."""
    token_ids = torch.tensor([row.token_ids for row in rows])
    weights = torch.tensor([row.weights for row in rows])[:, 1:].flatten()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=token_ids[:, :-1], use_cache=False).logits
    losses = torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), token_ids[:, 1:].flatten(), reduction="none"
    )
    written = weights == 1.0
    return (losses * weights).sum() / weights.sum(), losses[written].mean().detach()


def train(rows: RowMaker, schedule: list[Phase]) -> LlamaForCausalLM:
    model = LlamaForCausalLM(
        LlamaConfig(**MODEL_SETTINGS, rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA})
    )
    optimizers = make_optimizers(model)
    rates = torch.optim.lr_scheduler.LambdaLR
    schedulers = [rates(each, lambda step: learning_rate_factor(step, len(schedule))) for each in optimizers]
    print(f"{model.num_parameters()} parameters, {len(schedule)} steps", flush=True)
    started, average = time.monotonic(), 0.0
    for step, phase in enumerate(schedule):
        loss, answer_loss = batch_loss(model, [rows.row(phase) for _ in range(phase.num_rows)])
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        average = answer_loss.item() if step == 0 else 0.95 * average + 0.05 * answer_loss.item()
        if step % 20 == 0 or step == len(schedule) - 1:
            print(f"step {step} answer loss {average:.4f} {time.monotonic() - started:.0f} s", flush=True)
    return model


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (toy_model_path() / "chat_template.jinja").read_text(encoding="utf-8")
    special = {"special": True, "normalized": False, "lstrip": False, "rstrip": False, "single_word": False}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "model_max_length": CONTEXT_LENGTH,
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": {
            str(token_id): {"content": token, **special} for token_id, token in enumerate(SPECIAL_TOKENS)
        },
        "chat_template": template,
    }
    _write_json(folder / "tokenizer_config.json", settings)


def save_model(model: LlamaForCausalLM, folder: Path) -> None:
    tensors = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embedding
    }
    path = folder / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors makes it private, and it is to be packed and read by others
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **MODEL_SETTINGS,
        "rope_theta": ROPE_THETA,
        "torch_dtype": "bfloat16",
    }
    _write_json(folder / "config.json", settings)
    ends = {"eos_token_id": [TURN_END_ID, END_OF_TEXT_ID], "pad_token_id": END_OF_TEXT_ID}
    _write_json(folder / "generation_config.json", ends)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the toy model that ships with Kvasir.")
    parser.add_argument("--out", type=Path, default=toy_model_path(), help="folder for the checkpoint")
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--scale", type=float, default=1.0, help="train this many times as long")
    parser.add_argument("--num-threads", type=int, default=2)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(arguments.num_threads)
    dialogues = Dialogues(load_corpus(toy_model_path() / "corpus"), random.Random(arguments.seed))
    tokenizer = train_tokenizer(dialogues)
    save_tokenizer(tokenizer, arguments.out)
    model = train(RowMaker(tokenizer, dialogues), make_schedule(arguments.scale, dialogues.rng))
    save_model(model, arguments.out)


if __name__ == "__main__":
    main()
