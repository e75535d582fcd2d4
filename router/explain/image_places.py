"""Images of a prompt as people count them: which image of which message one is, told from paths in bodies.

Owns that sentence. Knows paths, never a picture.
"""

from collections.abc import Iterable

from router.explain.leaves import Path, steps_of

_PARTS = {"input": "item"}
"""Elements of a body's list where they are not messages."""


def image_differs(path: str, paths: Iterable[str]) -> str:
    """`image 2 of message 4 differs`, of the image at `path`; `paths` are those of all images of the body."""
    own = steps_of(path)
    numbers = _numbers(own)
    beside = {other for steps in map(steps_of, paths) if steps[:1] == own[:1] and (other := _numbers(steps))}
    rank = sum(other[:1] == numbers[:1] and other <= numbers for other in beside)
    if not numbers or not rank:
        return "an image differs"
    return f"image {rank} of {_PARTS.get(str(own[0]), 'message')} {numbers[0] + 1} differs"


def _numbers(steps: Path) -> tuple[int, ...]:
    return tuple(step for step in steps if isinstance(step, int))
