"""Writes checkpoints of models with random weights, the same ones each time, for the makers of such models.

Needs torch, and what makes the model.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_SEED = 0


def write_random_weights(make: Callable[[], Any], directory: Path) -> Any:
    """Save the transformers model that `make` returns, in bfloat16. Returns it."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        model = make().to(torch.bfloat16)
    model.save_pretrained(directory)
    return model


def write_or_exit(write: Callable[[], object], directory: Path) -> None:
    """Print where the model is that `write` has written, or exit with a sentence."""
    try:
        write()
    except ImportError as error:
        sys.exit(f"this needs transformers and torch, which come with vLLM: {error}")
    except OSError as error:
        sys.exit(f"cannot write the model into {directory}: {error}")
    sys.stdout.write(f"{directory}\n")
