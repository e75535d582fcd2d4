"""Settings: file < environment < flags, typed, and strict about names."""

from dataclasses import dataclass, fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicas.config import ENVIRONMENT_PREFIX, ReplicaConfig
from replicas.process.settings import (
    SettingsError,
    build,
    check_bounds,
    fill_old_settings,
    load_settings,
    old_setting,
    old_setting_warnings,
    old_settings_of,
    setting,
    settings_of,
    without_password,
)


@dataclass(frozen=True)
class Sample:
    name: str = setting(help="required")
    count: int = setting(3, help="a count")
    rate: float = setting(0.5, help="a rate in %")
    loud: bool = setting(False, help="a switch")
    limit: int | None = setting(None, help="an optional count")
    words: tuple[str, ...] = setting((), help="a list")

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError("count is negative")


def load(*arguments: str, **environment: str) -> Sample:
    return load_settings(
        Sample, arguments=arguments, environment=environment, prefix="T_", program="t", description="d"
    )


def test_flags_win_over_the_environment_and_the_environment_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("name: file\ncount: 1\nrate: 0.1\n")
    loaded = load("--config", str(file), "--rate", "0.3", T_COUNT="2", T_RATE="0.2")
    assert (loaded.name, loaded.count, loaded.rate) == ("file", 2, 0.3)
    assert load(T_CONFIG=str(file)).count == 1


@given(
    name=st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1).filter(
        lambda text: text.lower() != "none"
    ),
    count=st.integers(0, 10**9),
    rate=st.floats(allow_nan=False, allow_infinity=False),
    loud=st.booleans(),
    limit=st.none() | st.integers(),
    words=st.lists(st.sampled_from(["a", "b", "c"]), min_size=1).map(tuple),
)
def test_values_mean_the_same_as_text_and_as_themselves(
    name: str, count: int, rate: float, loud: bool, limit: int | None, words: tuple[str, ...]
) -> None:
    typed = {"name": name, "count": count, "rate": rate, "loud": loud, "limit": limit, "words": list(words)}
    as_text = {key: ",".join(words) if key == "words" else str(value) for key, value in typed.items()}
    in_brackets = as_text | {"words": str(list(words))}
    wanted = Sample(name, count, rate, loud, limit, words)
    assert build(Sample, typed) == build(Sample, as_text) == build(Sample, in_brackets) == wanted


@pytest.mark.parametrize("text", ["a,b", " a , b ", "a,b,", "[a, b]", "['a', \"b\"]", ["a", "b"], ("a", "b")])
def test_a_list_comes_with_commas_or_as_yaml(text: object) -> None:
    assert build(Sample, {"name": "n", "words": text}).words == ("a", "b")
    assert build(Sample, {"name": "n", "words": ""}).words == ()


@pytest.mark.parametrize("text", ["[a, b", "[a: b]", "[1]", "[*]", {"a": "b"}, 3])
def test_what_is_no_list_of_texts_is_one_sentence(text: object) -> None:
    with pytest.raises(SettingsError, match=r"setting words cannot be .*; it takes a list: A,B,C"):
        build(Sample, {"name": "n", "words": text})


@pytest.mark.parametrize(
    ("arguments", "environment", "sentence"),
    [
        ((), {"T_NAME": "n", "T_CUONT": "1"}, "environment variable T_CUONT; did you mean count?"),
        ((), {}, "setting name is required"),
        (("--name", "n", "--count", "many"), {}, "setting count cannot be 'many'; it takes a whole number"),
        (
            ("--name", "n", "--loud", "perhaps"),
            {},
            "setting loud cannot be 'perhaps'; it takes true or false",
        ),
        (("--name", "n", "--count", "-1"), {}, "count is negative"),
        (("--name", "n", "--config", "/nowhere.yaml"), {}, "cannot read the settings file /nowhere.yaml"),
    ],
)
def test_what_cannot_be_understood_is_one_sentence(
    arguments: tuple[str, ...], environment: dict[str, str], sentence: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        load(*arguments, **environment)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("- a list", "is not a mapping"),
        ("nmae: x", "did you mean name?"),
        ("a: [", "cannot read"),
        ("{1: 2}", "unknown key 1"),
    ],
)
def test_a_file_that_is_wrong_is_one_sentence(tmp_path: Path, content: str, sentence: str) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(content)
    with pytest.raises(SettingsError, match=sentence.replace("?", r"\?")):
        load("--config", str(file))


def test_an_unknown_flag_leaves_through_argparse(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load("--nmae", "x")
    assert caught.value.code == 2
    assert "--nmae" in capsys.readouterr().err


def test_help_documents_every_setting_of_a_replica(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_settings(
            ReplicaConfig,
            arguments=["--help"],
            environment={},
            prefix=ENVIRONMENT_PREFIX,
            program="p",
            description="d",
        )
    text = capsys.readouterr().out
    for field in fields(ReplicaConfig):
        assert "--" + field.name.replace("_", "-") in text
        assert field.metadata["help"]


@pytest.mark.parametrize(
    "text", ["a-b=1,c=x y,d=true", "{a-b: 1, c: x y, d: true}", {"a-b": 1, "c": "x y", "d": True}]
)
def test_a_mapping_comes_as_pairs_or_as_yaml(text: object) -> None:
    config = build(ReplicaConfig, {"engine": "vllm", "engine_args": text})
    assert config.engine_args == {"a-b": 1, "c": "x y", "d": True}


@pytest.mark.parametrize("text", ["a", "a=1,b", "=1", "{a", "{}x", 7])
def test_a_mapping_that_is_none_is_one_sentence(text: object) -> None:
    with pytest.raises(SettingsError, match=r"engine_args cannot be .*; it takes NAME=VALUE,NAME=VALUE"):
        build(ReplicaConfig, {"engine": "vllm", "engine_args": text})


def test_the_block_size_follows_the_engine_unless_it_is_set() -> None:
    assert ReplicaConfig().tokens_per_block == 16
    assert ReplicaConfig(engine="vllm").tokens_per_block == 32
    assert ReplicaConfig(engine="vllm", block_size=64).tokens_per_block == 64


def test_the_way_to_cached_keys_is_one_of_three_and_for_torch_only() -> None:
    with pytest.raises(SettingsError, match="attention is auto, gather or kernel, not flash"):
        ReplicaConfig(attention="flash")
    with pytest.raises(SettingsError, match="attention is for the engine torch, not for simulated"):
        ReplicaConfig(engine="simulated", attention="kernel")


def test_engine_args_are_for_vllm_only() -> None:
    with pytest.raises(SettingsError, match="engine_args is for the engine vllm"):
        ReplicaConfig(engine_args={"seed": 1})


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://127.0.0.1:6379/0", "redis://127.0.0.1:6379/0"),
        ("redis://[::1]:6379/0", "redis://[::1]:6379/0"),
        ("redis://me@host/0", "redis://me@host/0"),
        ("redis://:secret@host:6379/0", "redis://:***@host:6379/0"),
        ("rediss://me:sec:ret@host/0", "rediss://me:***@host/0"),
        ("redis://:se/c@re?t@host:6379", "redis://:***@host:6379"),
        ("redis://host/0?db=1&password=secret&x=y", "redis://host/0?db=1&password=***&x=y"),
        ("unix:///run/redis.sock?Password=secret", "unix:///run/redis.sock?Password=***"),
        ("me:secret@host:6379", "me:***@host:6379"),
        ("https://me:secret@collector:4318/v1", "https://me:***@collector:4318/v1"),
    ],
)
def test_a_url_is_shown_without_its_password(url: str, shown: str) -> None:
    assert without_password(url) == shown


@dataclass(frozen=True)
class Renamed:
    memory: int = setting(64, help="memory")
    cache: int = old_setting(lambda config: config.memory // 4, instead="set memory")
    seconds: float = old_setting(1.5, instead="then fixed at 1.5")

    def __post_init__(self) -> None:
        fill_old_settings(self)


def load_renamed(*arguments: str, **environment: str) -> Renamed:
    return load_settings(
        Renamed, arguments=arguments, environment=environment, prefix="T_", program="t", description="d"
    )


def test_an_old_setting_that_is_not_given_follows_the_new_one_and_warns_of_nothing() -> None:
    config = load_renamed("--memory", "100")
    assert (config.cache, config.seconds, old_setting_warnings(config)) == (25, 1.5, [])


@pytest.mark.parametrize("way", ["flag", "environment", "file"])
def test_an_old_setting_that_is_given_wins_with_a_warning(way: str, tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("memory: 100\ncache: 7\n" if way == "file" else "memory: 100\n")
    flags = ("--cache", "7") if way == "flag" else ()
    environment = {"T_CACHE": "7"} if way == "environment" else {}
    config = load_renamed("--config", str(file), *flags, **environment)
    assert (config.memory, config.cache) == (100, 7)
    assert old_setting_warnings(config) == [
        "setting cache still counts, and goes with the next version: set memory"
    ]


def test_an_old_setting_that_repeats_its_default_warns_too() -> None:
    assert len(old_setting_warnings(load_renamed("--seconds", "1.5"))) == 1


def test_an_old_setting_is_in_no_help_and_no_hint(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(settings_of(Renamed)) == ["memory"]
    assert old_settings_of(Renamed) == {"cache": "set memory", "seconds": "then fixed at 1.5"}
    with pytest.raises(SystemExit):
        load_renamed("--help")
    assert "--memory" in (text := capsys.readouterr().out) and "--cache" not in text
    with pytest.raises(SettingsError, match=r"unknown environment variable T_CACHES$"):
        load_renamed(T_CACHES="7")


@dataclass(frozen=True)
class Bounded:
    count: int | None = setting(1, help="a count", minimum=1)
    seconds: float = setting(0.5, help="a time", above=0)
    share: float = old_setting(0.5, instead="set count", minimum=0)

    def __post_init__(self) -> None:
        fill_old_settings(self)
        check_bounds(self)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"count": 0}, "setting count must be at least 1"),
        ({"seconds": 0}, "setting seconds must be above 0"),
        ({"seconds": "nan"}, "setting seconds must be above 0"),
        ({"share": -0.1}, "setting share must be at least 0"),
        ({"share": "nan"}, "setting share must be at least 0"),
    ],
)
def test_a_value_beyond_its_bound_is_one_sentence(values: dict[str, object], sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        build(Bounded, values)


def test_bounds_are_for_values_that_are_set() -> None:
    assert build(Bounded, {"count": "none", "share": 0}).count is None
