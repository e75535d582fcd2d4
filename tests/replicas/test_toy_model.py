"""The checkpoint that ships: complete, small, and able to say readable words."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jinja2
import pytest
import torch
import transformers
from tokenizers import Tokenizer

from replicas.toy_model import toy_model_path

MAX_CHECKPOINT_BYTES = 6_000_000
CHECKPOINT_FILES = (
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
)

Ask = Callable[..., str]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(toy_model_path())


@pytest.fixture(scope="module")
def model() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(toy_model_path(), dtype=torch.float32)


@pytest.fixture(scope="module")
def ask(model: Any, tokenizer: Any) -> Ask:
    """The greedy answer to the last message, with the special token that ended it."""

    def answer(*messages: tuple[str, str]) -> str:
        prompt = tokenizer.apply_chat_template(
            [{"role": role, "content": text} for role, text in messages],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )["input_ids"]
        output = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=80, do_sample=False
        )
        return str(tokenizer.decode(output[0, prompt.shape[1] :]))

    return answer


def read_json(name: str) -> Any:
    return json.loads((toy_model_path() / name).read_text(encoding="utf-8"))


def test_the_checkpoint_is_complete_and_small() -> None:
    sizes = [(toy_model_path() / name).stat().st_size for name in CHECKPOINT_FILES]
    assert min(sizes) > 0
    assert sum(sizes) < MAX_CHECKPOINT_BYTES


def test_finding_the_checkpoint_does_not_import_torch() -> None:
    code = "import sys, replicas.toy_model as m; m.toy_model_path(); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_the_configuration_is_a_llama_whose_weights_are_all_there(model: Any) -> None:
    config = read_json("config.json")
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["max_position_embeddings"] == 8192
    assert config["tie_word_embeddings"] is True
    assert all(bool(torch.isfinite(tensor).all()) for tensor in model.state_dict().values())


def test_chat_tokens_are_single_tokens_and_end_the_answer(tokenizer: Any) -> None:
    ids = [tokenizer.encode(token) for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    assert ids == [[0], [1], [2]]
    assert read_json("generation_config.json")["eos_token_id"] == [2, 0]
    assert read_json("config.json")["eos_token_id"] == 2
    assert tokenizer.eos_token == "<|im_end|>"


@pytest.mark.parametrize(
    "text",
    [
        "What is a KV cache?",
        "  two spaces,\ttabs\r\nand\n\n\nlines  ",
        "naïve café, Ærøskøbing, Größe",
        "Как дела? 今日はいい天気ですね。 مرحبا",
        "family 👩‍👩‍👧‍👦, flag 🇳🇴, smile 🙂",
        "zero width \u200b, nul \x00, end \U0010ffff",
        "12345 + 67 = 3.14e-10",
    ],
)
def test_any_text_survives_the_tokenizer(text: str) -> None:
    tokenizer = Tokenizer.from_file(str(toy_model_path() / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_the_vocabulary_fits_the_model() -> None:
    tokenizer = Tokenizer.from_file(str(toy_model_path() / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == read_json("config.json")["vocab_size"]


def test_the_template_writes_chatml(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Bye"},
    ]
    expected = (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello!<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
    )
    assert tokenizer.apply_chat_template(messages, tokenize=False) == expected
    open_turn = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert open_turn == expected + "<|im_start|>assistant\n"


def render(messages: Sequence[dict[str, Any]], **variables: Any) -> str:
    template = read_json("tokenizer_config.json")["chat_template"]
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(template).render(messages=messages, **variables)


def test_the_template_is_the_one_that_the_script_reads() -> None:
    source = (toy_model_path() / "chat_template.jinja").read_text(encoding="utf-8")
    assert read_json("tokenizer_config.json")["chat_template"] == source


def test_tools_come_before_the_system_text_one_json_line_each() -> None:
    tools = [{"name": "first", "note": "é"}, {"name": "second"}]
    rendered = render(
        [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}], tools=tools
    )
    assert rendered == (
        "<|im_start|>system\nYou may call these tools:\n"
        '{"name": "first", "note": "é"}\n{"name": "second"}\n'
        "\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    )


def test_tools_need_no_system_text() -> None:
    assert render([{"role": "user", "content": "Hi"}], tools=[{"name": "only"}]) == (
        '<|im_start|>system\nYou may call these tools:\n{"name": "only"}\n<|im_end|>\n'
        "<|im_start|>user\nHi<|im_end|>\n"
    )


@pytest.mark.parametrize("arguments", ['{"city": "Oslo"}', {"city": "Oslo"}])
def test_a_tool_call_and_its_result_are_rendered(arguments: object) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    rendered = render(
        [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "12 degrees"},
        ]
    )
    assert rendered == (
        '<|im_start|>assistant\n<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
        "<|im_end|>\n<|im_start|>tool\n12 degrees<|im_end|>\n"
    )


@pytest.mark.parametrize(
    ("question", "word"),
    [
        ("What is a KV cache?", "cache"),
        ("What does the router do?", "replica"),
        ("What is the capital of Norway?", "Oslo"),
        ("Who was Kvasir?", "wisest"),
        ("Hello!", "Hello"),
        ("How do I bake bread?", "flour"),
    ],
)
def test_known_questions_are_answered(ask: Ask, question: str, word: str) -> None:
    answer = ask(("user", question))
    assert word in answer
    assert answer.endswith("<|im_end|>")


def test_a_question_after_a_long_system_prompt_is_answered(ask: Ask) -> None:
    paragraph = (
        "This assistant belongs to a shop for musical instruments. It helps visitors to find a violin, "
        "explains how returns are handled, and never promises a discount. Opening hours are printed on "
        "the door. If a visitor is unhappy, apologize and offer to call a colleague. "
    )
    answer = ask(("system", paragraph * 22), ("user", "What is a KV cache?"))
    assert "cache" in answer
    assert answer.endswith("<|im_end|>")


def test_a_dialogue_stays_readable_over_turns(ask: Ask) -> None:
    turns = (
        ("Hi!", "Hello"),
        ("My name is Nora.", "Nora"),
        ("What is a replica?", "replica"),
        ("What is 2 plus 2?", "2 plus 2 is 4."),
        ("Why does it rain?", "cloud"),
        ("Thanks!", "welcome"),
    )
    dialogue = [("system", "You are a helpful assistant.")]
    for question, word in turns:
        dialogue.append(("user", question))
        answer = ask(*dialogue)
        assert word in answer
        assert answer.endswith("<|im_end|>")
        dialogue.append(("assistant", answer.removesuffix("<|im_end|>")))


@pytest.mark.parametrize(
    "text",
    [
        "Explain quantum chromodynamics.",
        "asdf qwer zxcv",
        "Как дела?",
        "def f(x): return x + 1",
        "0xdeadbeef 42",
    ],
)
def test_an_unknown_question_gets_words_and_not_noise(ask: Ask, text: str) -> None:
    answer = ask(("user", text))
    assert answer.endswith("<|im_end|>")
    words = answer.removesuffix("<|im_end|>").split()
    assert len(words) >= 3
    assert all(word.strip(".,:;!?\"'()").isalnum() for word in words)
