"""What the model of tests/clients says: rules for the simulated engine's script.

A prompt is answered by the rule whose words stand last in it, so each turn of a conversation ends in words of
its own, and what a tool returns leads to the next answer.
"""

import json
from collections.abc import Mapping


def call(name: str, **arguments: object) -> str:
    """A tool call as the model writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


RULES: Mapping[str, str] = {
    "Say hello.": "Hello there, my friend!",
    "Count to nine.": "one two three four five six seven eight nine",
    "What is the sky like?": "<think>\nThey ask about the sky.\n</think>\n\nIt is blue.",
    "the weather in Paris?": call("weather", city="Paris"),
    "the weather in Paris and Rome?": f"{call('weather', city='Paris')}\n{call('weather', city='Rome')}",
    "Think about the weather in Oslo": "<think>\nI need a tool.\n</think>\n\n" + call("weather", city="Oslo"),
    "21 degrees": "It is 21 degrees there.",
    "Who wrote the first program?": '{"name": "Ada", "age": 36}',
}
