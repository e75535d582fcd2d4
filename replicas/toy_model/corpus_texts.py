"""Corpus: the hand-written texts in `corpus/`, read into plain values.

Owns the formats of the files. `dialogues.py` combines the texts.

`qa_*.txt` holds entries between empty lines: `T:` a topic (its forms separated by `;`), from which
questions are made, `Q:` a question of its own, `A:` an answer. `memory.txt` holds what a user can tell
and ask back: the kind, `Y:` how it is told, `R:` a reply, `Q:` the question, `A:` its answer, `U:` the
answer when it was never told. `prose_*.txt` holds paragraphs, `words.txt` one class of words a line, all
others one phrase a line.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing that the model knows: ways to ask for it and ways to answer."""

    topics: tuple[str, ...]
    questions: tuple[str, ...]
    answers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Memory:
    """One kind of thing that a user tells and asks back."""

    kind: str
    tellings: tuple[str, ...]
    replies: tuple[str, ...]
    questions: tuple[str, ...]
    answer: str
    unknown: str


@dataclass(frozen=True, slots=True)
class Corpus:
    entries: tuple[Entry, ...]
    small_talk: tuple[Entry, ...]
    memories: tuple[Memory, ...]
    paragraphs: tuple[str, ...]
    topic_questions: tuple[str, ...]
    openings: tuple[str, ...]
    closings: tuple[str, ...]
    system_lines: tuple[str, ...]
    instructions: tuple[str, ...]
    sentences: tuple[str, ...]
    fallbacks: tuple[str, ...]
    words: Mapping[str, tuple[str, ...]]

    def texts(self) -> Iterator[str]:
        """Everything that was written by hand, for training the tokenizer."""
        for entry in self.entries:
            yield from (*entry.topics, *entry.questions, *entry.answers)
        yield from (*self.paragraphs, *self.topic_questions, *self.openings, *self.closings)
        yield from (*self.system_lines, *self.instructions, *self.sentences, *self.fallbacks)
        for words in self.words.values():
            yield " ".join(words)


def load_corpus(folder: Path) -> Corpus:
    words = dict(line.split(": ", 1) for line in _lines(folder, "words.txt"))
    return Corpus(
        entries=tuple(_entry(block) for block in _blocks(folder, "qa_*.txt")),
        small_talk=tuple(_entry(block) for block in _blocks(folder, "qa_talk.txt")),
        memories=tuple(_memory(block) for block in _blocks(folder, "memory.txt")),
        paragraphs=tuple(" ".join(block.split()) for block in _blocks(folder, "prose_*.txt")),
        topic_questions=_lines(folder, "topic_questions.txt"),
        openings=_lines(folder, "openings.txt"),
        closings=_lines(folder, "closings.txt"),
        system_lines=_lines(folder, "system_lines.txt"),
        instructions=_lines(folder, "instructions.txt"),
        sentences=_lines(folder, "sentences.txt"),
        fallbacks=_lines(folder, "fallback.txt"),
        words={kind: tuple(text.split()) for kind, text in words.items()},
    )


def _blocks(folder: Path, pattern: str) -> Iterator[str]:
    for path in sorted(folder.glob(pattern)):
        yield from (
            block.strip() for block in path.read_text(encoding="utf-8").split("\n\n") if block.strip()
        )


def _lines(folder: Path, name: str) -> tuple[str, ...]:
    return tuple(line for line in (folder / name).read_text(encoding="utf-8").splitlines() if line)


def _fields(lines: list[str]) -> Mapping[str, list[str]]:
    fields: dict[str, list[str]] = {kind: [] for kind in "TQAYRU"}
    for line in lines:
        kind, text = line.split(": ", 1)
        fields[kind].extend(text.split("; ") if kind == "T" else [text])
    return fields


def _entry(block: str) -> Entry:
    fields = _fields(block.splitlines())
    entry = Entry(tuple(fields["T"]), tuple(fields["Q"]), tuple(fields["A"]))
    assert entry.answers, f"an entry without an answer: {block}"
    assert entry.topics or entry.questions, f"an entry without topic or question: {block}"
    return entry


def _memory(block: str) -> Memory:
    kind, *lines = block.splitlines()
    fields = _fields(lines)
    (answer,), (unknown,) = fields["A"], fields["U"]
    return Memory(kind, tuple(fields["Y"]), tuple(fields["R"]), tuple(fields["Q"]), answer, unknown)
