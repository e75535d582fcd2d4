"""Makes a model that takes images: an Idefics3 with random weights, the toy model's words and tiny tiles.

It answers noise. It is there to try and to test what happens to images on their way through Kvasir, on any
machine: its vision part needs nothing beyond what vLLM brings, not even on a CPU. The file of weights has
2 MB, and making it takes some 15 seconds::

    python -m replicas.toy_model.make_image_model DIRECTORY

transformers has to be installed, as it is wherever vLLM is. The same versions of torch and transformers make
the same files.

Owns the shape of that model.
"""

import argparse
from importlib import import_module
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from replicas.toy_model import toy_model_path
from replicas.toy_model.random_checkpoint import write_or_exit, write_random_weights

TILES_PER_SIDE = 2
TILE_SIDE = 112
PATCH_SIDE = 14
SCALE_FACTOR = 2
TILE_TOKENS = (TILE_SIDE // (PATCH_SIDE * SCALE_FACTOR)) ** 2
CONTEXT_LENGTH = 8192
_TURN_END_ID = 2

_WORDS = {
    "fake_image_token": "<fake_token_around_image>",
    "image_token": "<image>",
    "end_of_utterance_token": "<end_of_utterance>",
    "global_image_token": "<global-img>",
}
_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {{- '<image>' if part.type == 'image' else part.text }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def write_image_model(directory: Path) -> None:
    """Raises ImportError without transformers or torch, and OSError."""
    transformers: Any = import_module("transformers")
    config = write_processor(directory)
    write_random_weights(lambda: transformers.Idefics3ForConditionalGeneration(config), directory)


def write_processor(directory: Path) -> Any:
    """Write all but the weights: the tokenizer and processor. Returns the model's configuration.

    Raises ImportError and OSError.
    """
    transformers: Any = import_module("transformers")
    pillow_images: Any = import_module("transformers.models.idefics3.image_processing_pil_idefics3")
    base = Tokenizer.from_file(str(toy_model_path() / "tokenizer.json"))
    sides = range(1, TILES_PER_SIDE + 1)
    words = [*_WORDS.values(), *(f"<row_{row}_col_{column}>" for row in sides for column in sides)]
    base.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in words])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=base,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        bos_token=None,
        unk_token=None,
        model_max_length=CONTEXT_LENGTH,
        clean_up_tokenization_spaces=False,
        chat_template=_TEMPLATE,
        extra_special_tokens=_WORDS,
    )
    images = pillow_images.Idefics3ImageProcessorPil(
        size={"longest_edge": TILES_PER_SIDE * TILE_SIDE}, max_image_size={"longest_edge": TILE_SIDE}
    )
    processor = transformers.Idefics3Processor(
        image_processor=images, tokenizer=tokenizer, image_seq_len=TILE_TOKENS, chat_template=_TEMPLATE
    )
    processor.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    config = transformers.Idefics3Config(**_shape(tokenizer.convert_tokens_to_ids(_WORDS["image_token"])))
    config.save_pretrained(directory)
    return config


def _shape(image_token_id: int) -> dict[str, Any]:
    return {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "image_token_id": image_token_id,
        "scale_factor": SCALE_FACTOR,
        "pad_token_id": 0,
        "vision_config": {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": TILE_SIDE,
            "patch_size": PATCH_SIDE,
        },
        "text_config": {
            "model_type": "llama",
            "vocab_size": 2064,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": CONTEXT_LENGTH,
            "rms_norm_eps": 1e-5,
            "bos_token_id": None,
            "eos_token_id": _TURN_END_ID,
            "pad_token_id": 0,
            "tie_word_embeddings": False,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a tiny model that takes images.")
    parser.add_argument("directory", type=Path, help="where its files go; made if it is not there")
    directory: Path = parser.parse_args().directory
    write_or_exit(lambda: write_image_model(directory), directory)


if __name__ == "__main__":
    main()
