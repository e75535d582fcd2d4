"""What the model of tests/clients says: rules for the simulated engine's script.

A prompt is answered by the rule whose words stand last in it, so each turn of a conversation ends in words of
its own, and what a tool returns leads to the next answer.
"""

import json
from collections.abc import Mapping

NOTES = ("apple", "birch", "cedar", "dill", "elder")
"""What the files note-1 … note-5 say, which coding agents are asked about in turn."""


def call(name: str, /, **arguments: object) -> str:
    """A tool call as the model writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def reading_notes(agent: str, tool: str, argument: str) -> dict[str, str]:
    """What an agent's model says when it is asked for a note: it thinks, and looks by the agent's tool."""
    return {
        f"{agent}, read note {number}.": "<think>\nI have to look.\n</think>\n\n"
        + call(tool, **{argument: f"cat note-{number}"})
        for number, _ in enumerate(NOTES, 1)
    }


RULES: Mapping[str, str] = {
    "Say hello.": "Hello there, my friend!",
    "Count to nine.": "one two three four five six seven eight nine",
    "What is the sky like?": "<think>\nThey ask about the sky.\n</think>\n\nIt is blue.",
    "the weather in Paris?": call("weather", city="Paris"),
    "the weather in Paris and Rome?": f"{call('weather', city='Paris')}\n{call('weather', city='Rome')}",
    "Think about the weather in Oslo": "<think>\nI need a tool.\n</think>\n\n" + call("weather", city="Oslo"),
    "21 degrees": "It is 21 degrees there.",
    "5 degrees": "<think>\nThat is cold.\n</think>\n\nTake a coat.",
    "Who wrote the first program?": '{"name": "Ada", "age": 36}',
    "Which author is final?": call("final_result", name="Ada", age=36),
    **reading_notes("Codex", "exec_command", "cmd"),
    **reading_notes("Claude", "Bash", "command"),
    "Codex, look at the picture.": call("view_image", path="picture.png"),
    "Claude, look at the picture.": call("Read", file_path="picture.png"),
    "an image, which cannot be read here": "It cannot be seen.",
    **{f"the word is {word}": f"The note says {word}." for word in NOTES},
}


NUM_STEPS, HELPER_AT, SHORTENED_AT, HELPER_STEPS = 20, 5, 10, (21, 23)
"""Of a task whose steps an agent reads one after the other: step 5 asks a helper, who reads steps 21 to 23,
and the conversation is shortened after step 10."""


def following_steps(
    agent: str, tool: tuple[str, str], helper: tuple[str, str, dict[str, str]], started: str, shorten: str
) -> dict[str, str]:
    """What an agent's model says on that task.

    `helper` is the tool that starts one, its argument for the prompt and the others; `started` is in that
    tool's result, and `shorten` in the agent's own request for a summary.
    """
    looks = {
        number: "<think>\nI have to look.\n</think>\n\n" + call(tool[0], **{tool[1]: f"cat step-{number}"})
        for number in range(1, HELPER_STEPS[1] + 1)
    }
    start, argument, others = helper
    begin = f"{agent}, go to step {HELPER_STEPS[0]}."
    return {
        **{f"{agent}, go to step {number}.": look for number, look in looks.items()},
        f"{agent}, ask a helper.": call(start, **others, **{argument: begin}),
        started: looks[HELPER_AT + 1],
        f"{agent}, all helping is done.": f"{agent}'s helper has seen it.",
        f"{agent}, all is done.": "I have read all steps.",
        shorten: f"<summary>\nHalf is done. {agent}, go to step {SHORTENED_AT + 1}.\n</summary>",
    }
