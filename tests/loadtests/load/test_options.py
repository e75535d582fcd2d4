from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest

from loadtests.load.options import (
    LoadOptions,
    OptionsError,
    add_arguments,
    leader_options,
    load_options,
    seed_of,
)
from loadtests.workloads import cross_user


class Parser(ArgumentParser):
    """Takes what Locust's parser takes."""

    def add_argument(self, *names: str, **options: Any) -> Any:
        for own in ("is_secret", "env_var"):
            options.pop(own, None)
        return super().add_argument(*names, **options)


def parsed(*words: str) -> Any:
    parser = Parser()
    add_arguments(parser)
    return parser.parse_args(words)


def options_of(*words: str) -> LoadOptions:
    return load_options(parsed(*words), model="m", seed=7)


def test_the_defaults_are_the_generators_own_workload() -> None:
    workload, num_left_out = options_of().make_workload(None)
    assert workload == cross_user(seed=7, duration_seconds=60.0)
    assert num_left_out == 0


def test_parameters_reach_the_generator_from_a_command_line_and_from_a_form() -> None:
    expected = cross_user(seed=7, qps=9.0, duration_seconds=5.0, num_tenants=2, system_tokens=99)
    words = ["--qps", "9", "--duration", "5"]
    line = options_of(*words, "--set", "num_tenants=2", "--set", "system_tokens=99")
    assert line.make_workload(None)[0] == expected
    form = parsed(*words)
    form.set = "num_tenants=2, system_tokens=99"
    assert load_options(form, model="m", seed=7).make_workload(None)[0] == expected


def test_a_shape_keeps_the_duration_and_the_number_of_requests_about_its_amount() -> None:
    plain, _ = options_of("--qps", "50").make_workload(None)
    shaped, _ = options_of("--qps", "50", "--shape", "ramp").make_workload(None)
    assert len(shaped.requests) == len(plain.requests)
    assert shaped.duration_seconds < 60
    half = sum(request.arrival_seconds < 30 for request in shaped.requests) / len(shaped.requests)
    assert half < 0.35
    closed, _ = options_of("--qps", "50", "--shape", "ramp", "--closed-loop", "4").make_workload(None)
    assert closed == plain


def test_twice_the_speed_is_twice_the_requests_in_the_same_time() -> None:
    plain, _ = options_of("--workload", "chat").make_workload(None)
    fast, _ = options_of("--workload", "chat", "--speed", "2").make_workload(None)
    assert 1.6 < len(fast.requests) / len(plain.requests) < 2.4
    assert fast.duration_seconds < 60


def test_a_trace_is_replayed_as_far_as_it_fits(tmp_path: Path) -> None:
    line = '{"timestamp": %d, "input_length": %d, "output_length": 8, "hash_ids": %s}\n'
    trace = tmp_path / "trace.jsonl"
    lines = [line % (1, 600, [1, 2]), line % (2000, 3500, [*range(7)]), line % (9000, 600, [1, 3])]
    trace.write_text("".join(lines))
    words = ["--workload", "trace", "--trace", str(trace), "--duration", "5"]
    workload, num_left_out = options_of(*words).make_workload(4096)
    assert [request.num_input_tokens for request in workload.requests] == [600]
    assert num_left_out == 1, "3,500 words may be more than 4,096 tokens"
    small, num_left_out = options_of(*words, "--scale-tokens", "0.5").make_workload(4096)
    assert [request.num_input_tokens for request in small.requests] == [300, 1750]
    assert num_left_out == 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--qps", "many"], "--qps takes a number above 0, not many"),
        (["--duration", "0"], "--duration takes a number above 0"),
        (
            ["--set", "warp=9"],
            "--set: warp=9 is not NAME=VALUE of one of cross-user's parameters: num_tenants",
        ),
        (["--set", "seed=9"], "--set: seed=9 is not NAME=VALUE of one of cross-user's parameters"),
        (
            ["--set", "num_tenants=two"],
            "--set: num_tenants takes a whole number above 0 and up to 1,000,000, not two",
        ),
        (["--scale-tokens", "100"], "cross-user: tokens are scaled by a factor"),
        (["--workload", "trace"], "the workload trace needs --trace FILE"),
        (["--workload", "trace", "--trace", "x", "--qps", "1"], "a trace has its own pace"),
        (["--shape-low", "-1"], "--shape-low takes a number from 0, not -1"),
        (["--shape", "ramp", "--shape-low", "0", "--shape-high", "0"], "not both 0"),
        (["--duration", "0.001"], "nothing is left to send"),
    ],
)
def test_options_that_make_no_sense_get_one_sentence(words: list[str], sentence: str) -> None:
    with pytest.raises(OptionsError, match=sentence):
        options_of(*words).make_workload(None)


def test_a_kill_is_half_way_unless_told_otherwise() -> None:
    assert leader_options(parsed("--kill-command", "true")).kill_at == (30.0,)
    several = leader_options(parsed("--kill-command", "true", "--kill-at", "3", "--kill-at", "9"))
    assert several.kill_at == (3.0, 9.0)
    with pytest.raises(OptionsError, match="needs --kill-command"):
        leader_options(parsed("--shape", "replica-kill"))


def test_without_a_seed_every_run_has_its_own() -> None:
    assert seed_of(parsed()) is None
    assert seed_of(parsed("--seed", "12")) == 12


def test_keys_of_tenants_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    file.write_text('{"acme": "sk-1", "beta": "sk-2"}')
    found = load_options(parsed(f"--api-keys={file}"), model="m", seed=1)
    assert (found.api_keys, found.api_key) == ({"acme": "sk-1", "beta": "sk-2"}, "sk-1")
    assert load_options(parsed(f"--api-keys={file}", "--api-key=sk-0"), model="m", seed=1).api_key == "sk-0"
    for text in ("", "[]", '{"acme": 1}'):
        file.write_text(text)
        with pytest.raises(OptionsError, match=f"--api-keys: {file} holds no JSON object of keys"):
            load_options(parsed(f"--api-keys={file}"), model="m", seed=1)
