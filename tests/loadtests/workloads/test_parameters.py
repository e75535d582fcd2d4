"""A workload's parameters as they are typed: what makes no sense gets a sentence, before anything is made."""

import pytest

from loadtests.load.options import CHATS, LoadOptions
from loadtests.workloads import GENERATORS
from loadtests.workloads.parameters import MAY_BE_ZERO, parameter_names, read_parameter

NAMES = [(workload, name) for workload in GENERATORS for name in parameter_names(workload)]
ZEROS = [each for each in NAMES if each[0] in CHATS and each[1].endswith((*MAY_BE_ZERO, "_share"))]


@pytest.mark.parametrize(("workload", "name"), NAMES)
@pytest.mark.parametrize("text", ["-3", "nan", "inf", "many", ""])
def test_no_generator_is_asked_for_less_than_nothing_or_for_no_number(
    workload: str, name: str, text: str
) -> None:
    with pytest.raises(ValueError, match=f"^{name} takes a .*number (from|above) 0.*, not {text}$"):
        read_parameter(workload, f"{name}={text}")


@pytest.mark.parametrize(("workload", "name"), ZEROS)
def test_what_may_be_zero_leaves_something_to_send(workload: str, name: str) -> None:
    made, _ = LoadOptions(workload, "m", 1, 10.0, parameters=f"{name}=0").make_workload(None)
    assert all(request.num_input_tokens > 0 and request.num_output_tokens > 0 for request in made.requests)
