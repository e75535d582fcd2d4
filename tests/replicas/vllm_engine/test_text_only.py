"""A model that takes images, on a vLLM that serves it for text alone."""

import random
from pathlib import Path
from typing import Any

import pytest

from replicas.engine import RequestRefused
from replicas.engine_process.build import build_engine
from replicas.proof import prove_hashes
from replicas.protocol.blocks import ImageTokens
from tests.replicas.builders import engine_request
from tests.replicas.vllm_engine.conftest import vllm_config

pytestmark = pytest.mark.vllm


def test_it_is_proven_without_images_and_refuses_them(environment: None, tmp_path: Path) -> None:
    from replicas.toy_model.make_image_model import write_image_model

    write_image_model(tmp_path)
    engine: Any = build_engine(vllm_config(model=str(tmp_path), context_length=1024, image_bytes=0))[0]
    try:
        assert engine.card.image_rule == ""
        assert prove_hashes(engine, random.Random(0)) < 300
        with pytest.raises(RequestRefused, match="reads text only"):
            engine.add(engine_request([5] * 40, media=(ImageTokens(bytes(32), 0, 5),)))
    finally:
        engine.close()
