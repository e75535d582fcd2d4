"""The toy model that ships with Kvasir: its files.

Owns the checkpoint, which a script of commit `086af0ae` made from texts that lie beside it there. The rest of
the project treats it as any checkpoint directory.
"""

from pathlib import Path


def toy_model_path() -> Path:
    """Return the checkpoint directory: config, weights, tokenizer, chat template."""
    return Path(__file__).resolve().parent


def checkpoint_directory(model: str | None) -> Path:
    """Return a replica's checkpoint directory for its setting `model`."""
    return toy_model_path() if model is None else Path(model)
