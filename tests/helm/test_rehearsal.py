"""What an installation would do, told without a cluster."""

from pathlib import Path

import pytest
import yaml

from tests.helm import rehearsal
from tests.helm.chart import EXAMPLES, FOLDER

pytestmark = pytest.mark.timeout(60)

NAME = {"name": "{{ .Release.Name }}-keys"}


def test_objects_of_ones_own_are_installed_whether_kubernetes_has_their_schema_or_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign = {"apiVersion": "external-secrets.io/v1", "kind": "ExternalSecret", "metadata": NAME}
    claim = {**foreign, "apiVersion": "v1", "kind": "PersistentVolumeClaim"}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"extraObjects": [foreign, claim]}))
    assert rehearsal.main([str(FOLDER / "ci/laptop.yaml"), str(tmp_path / "mine.yaml")]) == 0
    said = capsys.readouterr().out
    assert "ExternalSecret kvasir-keys" in said
    assert "PersistentVolumeClaim kvasir-keys" in said
    assert "1 are of kinds that are not Kubernetes' own" in said


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_example_is_installed_upgraded_and_gone(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert rehearsal.main([str(FOLDER / f"ci/{name}.yaml")]) == 0
    said = capsys.readouterr().out
    for line in (
        "Deployment kvasir-router",
        "nothing changed",
        "left behind: nothing",
        "helm --namespace llm test",
    ):
        assert line in said


def test_the_first_values_of_the_page_serve_the_model_that_its_first_request_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (FOLDER.parent / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    text = page.split("cat > mine.yaml <<END\n")[1].split("END\n")[0]
    (tmp_path / "mine.yaml").write_text(text)
    assert rehearsal.main([str(tmp_path / "mine.yaml")]) == 0
    name = yaml.safe_load(text)["pools"]["qwen"]["model"]["name"]
    assert f'{{"model": "{name}"' in page
    said = capsys.readouterr().out
    assert f"pool qwen: 2 × vllm, {name}" in said
    assert "asks for no GPU" not in said


def test_later_values_win_key_by_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("router: {keys: {open: true}}\npools: {one: {replicas: 2}, two: {}}\n")
    second.write_text("pools: {one: {replicas: 3}}\n")
    assert rehearsal.main([str(first), str(second)]) == 0
    said = capsys.readouterr().out
    assert "pool one: 3 ×" in said
    assert "pool two:" in said


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("pols: {}", "pols"),
        ("router: {extraEnv: [{nam: A}]}", "nam"),
        ("[1]", "no mapping"),
        ("a: [", "cannot be read"),
    ],
)
def test_what_is_wrong_is_named_and_nothing_installed(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "values.yaml"
    path.write_text(text)
    assert rehearsal.main([str(path)]) == 1
    said = capsys.readouterr()
    assert words in said.err
    assert "installed" not in said.out
