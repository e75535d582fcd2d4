"""The tiny models whose layers keep different caches: small, made alike each time, with the toy's words."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from replicas.checkpoints.weights import files_fingerprint, tokenizer_bundle
from replicas.toy_model import toy_model_path
from replicas.toy_model.make_hybrid_model import FAMILIES, main, write_hybrid_model

MAX_BYTES = 2_500_000


@pytest.mark.parametrize("family", FAMILIES)
def test_each_is_small_and_made_the_same_each_time(family: str, tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_hybrid_model(family, tmp_path / name)
    one = tmp_path / "one"
    assert sum(path.stat().st_size for path in one.iterdir()) < MAX_BYTES
    assert files_fingerprint(one) == files_fingerprint(tmp_path / "two")
    assert tokenizer_bundle(one).files["tokenizer.json"] == (toy_model_path() / "tokenizer.json").read_bytes()
    config = json.loads((one / "config.json").read_text())
    assert config["architectures"][0].endswith("ForCausalLM")


def test_the_command_makes_one(tmp_path: Path) -> None:
    path = tmp_path / "new"
    done = subprocess.run(
        [sys.executable, "-m", "replicas.toy_model.make_hybrid_model", "mistral", str(path)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stdout) == (0, f"{path}\n"), done.stderr
    assert (path / "model.safetensors").exists()


def test_where_nothing_can_be_written_the_command_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("here already")
    monkeypatch.setattr(sys, "argv", ["make_hybrid_model", "mistral", str(tmp_path / "file" / "directory")])
    with pytest.raises(SystemExit, match="cannot write the model into"):
        main()
