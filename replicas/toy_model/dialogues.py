"""Dialogues: an endless, seeded supply of chats, combined from the texts in `corpus/`.

Owns the format of the corpus files and the grammar of the combinations. Knows nothing of tokens,
models or training.

`qa_*.txt` holds entries separated by empty lines: `T:` a topic (forms separated by `;`), from which
questions are made, `Q:` a question of its own, `A:` an answer. `prose_*.txt` holds paragraphs,
`instructions.txt` and `fallback.txt` one sentence a line, `words.txt` one word class a line.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

TOPIC_QUESTIONS = (
    "What is {}?", "What is {}?", "What is {}?", "What's {}?", "Tell me about {}.", "Explain {}.",
    "Can you explain {}?", "What do you know about {}?", "Please describe {}.", "Describe {}.", "{}?",
    "Could you tell me what {} is?", "I would like to know about {}.", "How would you describe {}?",
    "Explain {} in one sentence.", "What can you say about {}?", "What does {} mean?", "Tell me what {} is.",
)  # fmt: skip
OPENINGS = (
    "Hi! ", "Hello, ", "Please: ", "Quick question: ", "One more thing: ", "Thanks. ", "Okay. ", "So, ", "And ",
    "In short, ", "Next question. ", "Now tell me: ", "Be brief. ", "I have a question. ", "Another question: ",
)  # fmt: skip
CLOSINGS = (
    " Please be brief.",
    " Thank you!",
    " Thanks.",
    " Answer in one sentence.",
    " Please.",
    " Keep it short.",
)
SYSTEM_LINES = (
    "You are a helpful assistant.", "You are Kvasir, a friendly assistant.", "You answer briefly.",
    "You are a test assistant.", "Answer the question.", "Be concise.",
)  # fmt: skip
NUMBER_WORDS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
)  # fmt: skip
PSEUDO_SYLLABLES = (
    "ba", "ko", "ri", "tun", "mel", "zor", "fi", "plex", "gra", "no", "wim", "sta", "qu", "ly", "dax", "pho",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    text: str


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing that the model knows: ways to ask for it and ways to answer."""

    topics: tuple[str, ...]
    questions: tuple[str, ...]
    answers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Corpus:
    entries: tuple[Entry, ...]
    paragraphs: tuple[str, ...]
    instructions: tuple[str, ...]
    fallbacks: tuple[str, ...]
    words: Mapping[str, tuple[str, ...]]

    def texts(self) -> Iterator[str]:
        """Everything that was written by hand, for training the tokenizer."""
        for entry in self.entries:
            yield from (*entry.topics, *entry.questions, *entry.answers)
        yield from (*self.paragraphs, *self.instructions, *self.fallbacks)
        for words in self.words.values():
            yield " ".join(words)


def load_corpus(folder: Path) -> Corpus:
    def blocks(pattern: str) -> Iterator[str]:
        for path in sorted(folder.glob(pattern)):
            yield from (block for block in path.read_text(encoding="utf-8").split("\n\n") if block.strip())

    def lines(name: str) -> tuple[str, ...]:
        return tuple(line for line in (folder / name).read_text(encoding="utf-8").splitlines() if line)

    words = dict(line.split(": ", 1) for line in lines("words.txt"))
    return Corpus(
        entries=tuple(_entry(block) for block in blocks("qa_*.txt")),
        paragraphs=tuple(" ".join(block.split()) for block in blocks("prose_*.txt")),
        instructions=lines("instructions.txt"),
        fallbacks=lines("fallback.txt"),
        words={kind: tuple(text.split()) for kind, text in words.items()},
    )


def _entry(block: str) -> Entry:
    fields: dict[str, list[str]] = {"T": [], "Q": [], "A": []}
    for line in block.strip().splitlines():
        kind, text = line.split(": ", 1)
        fields[kind].extend(text.split("; ") if kind == "T" else [text])
    entry = Entry(tuple(fields["T"]), tuple(fields["Q"]), tuple(fields["A"]))
    assert entry.answers, f"an entry without an answer: {block}"
    assert entry.topics or entry.questions, f"an entry that nobody can ask for: {block}"
    return entry


@dataclass(slots=True)
class Dialogues:
    """Draws texts and turns; the same seed and the same calls give the same dialogues."""

    corpus: Corpus
    rng: random.Random
    _noise: tuple[Callable[[], str], ...] = field(init=False)

    def __post_init__(self) -> None:
        self._noise = (self._grammar_sentence, self._grammar_sentence, self._word_soup, self._identifiers,
                       self._json_line, self._pseudo_sentence)  # fmt: skip

    def system_text(self, num_words: int) -> str:
        """A system prompt of about so many words; what it says has no bearing on the answers."""
        parts = [self.rng.choice(SYSTEM_LINES)] if self.rng.random() < 0.7 else []
        num = sum(len(part.split()) for part in parts)
        style = self.rng.random()
        while num < num_words:
            part = self._system_part(style)
            parts.append(part)
            num += len(part.split())
        return self.rng.choice((" ", " ", "\n", "\n- ")).join(parts) or SYSTEM_LINES[0]

    def prose(self) -> str:
        return self.rng.choice(self.corpus.paragraphs)

    def turns(self, num_turns: int) -> Iterator[Message]:
        """User and assistant messages in turn; facts that the user told are asked back."""
        told: dict[str, str] = {}
        for _ in range(num_turns):
            draw = self.rng.random()
            if draw < 0.06:
                yield from self._telling_turn(told)
            elif draw < 0.12:
                yield from self._asking_back_turn(told)
            elif draw < 0.20:
                yield from self._arithmetic_turn()
            elif draw < 0.34:
                yield from self._fallback_turn()
            elif draw < 0.40:
                yield from self._document_turn()
            elif draw < 0.42:
                yield from self._tool_turn()
            else:
                yield from self._known_turn()

    def _known_turn(self) -> Iterator[Message]:
        entry = self.rng.choice(self.corpus.entries)
        yield Message("user", self._varied(self._question(entry)))
        yield Message("assistant", self.rng.choice(entry.answers))

    def _document_turn(self) -> Iterator[Message]:
        """A text with a question before or after it."""
        entry = self.rng.choice(self.corpus.entries)
        text = " ".join(self._system_part(self.rng.random()) for _ in range(self.rng.randint(1, 4)))
        question = self._question(entry)
        yield Message("user", self.rng.choice((f"{text}\n\n{question}", f"{text} {question}")))
        yield Message("assistant", self.rng.choice(entry.answers))

    def _fallback_turn(self) -> Iterator[Message]:
        if self.rng.random() < 0.5:
            thing = self._unknown_thing()
            text = self._varied(self.rng.choice(TOPIC_QUESTIONS).format(thing))
        else:
            num_parts = self.rng.choice((1, 1, 1, 2, 4))
            text = " ".join(self.rng.choice(self._noise)() for _ in range(num_parts))
        yield Message("user", text)
        yield Message("assistant", self.rng.choice(self.corpus.fallbacks))

    def _arithmetic_turn(self) -> Iterator[Message]:
        left, right = self.rng.randint(0, 10), self.rng.randint(0, 10)
        sign, word = self.rng.choice((("+", "plus"), ("+", "plus"), ("-", "minus"), ("*", "times")))
        if sign == "-":
            left, right = max(left, right), min(left, right)
        result = {"+": left + right, "-": left - right, "*": left * right}[sign]
        if sign != "*" and self.rng.random() < 0.3:
            a, b, c = (NUMBER_WORDS[number] for number in (left, right, result))
            question, answer = f"{a} {word} {b}", f"{a.capitalize()} {word} {b} is {c}."
        else:
            question = self.rng.choice(
                (f"{left} {word} {right}", f"{left}{sign}{right}", f"{left} {sign} {right}")
            )
            answer = f"{left} {word} {right} is {result}."
        form = self.rng.choice(("What is {}?", "How much is {}?", "{}?", "{} =", "{}", "Calculate {}."))
        yield Message("user", form.format(question))
        yield Message("assistant", answer)

    def _telling_turn(self, told: dict[str, str]) -> Iterator[Message]:
        kind = self.rng.choice(("name", "city", "color", "animal"))
        value = self.rng.choice(self.corpus.words[kind])
        told[kind] = value
        says, answers = {
            "name": (("My name is {}.", "I am {}.", "Hello, my name is {}.", "Call me {}."),
                     ("Nice to meet you, {}!", "Hello, {}! How can I help you?")),
            "city": (("I live in {}.", "My home is in {}.", "I come from {}."),
                     ("{} sounds like a fine place to live.",)),
            "color": (("My favorite color is {}.", "I like the color {} best."),
                      ("I will remember that you like {}.",)),
            "animal": (("My pet is a {}.", "I have a {} at home."),
                       ("A {} is good company, I am sure.",)),
        }[kind]  # fmt: skip
        yield Message("user", self._varied(self.rng.choice(says).format(value), lower=False))
        yield Message("assistant", self.rng.choice(answers).format(value))

    def _asking_back_turn(self, told: dict[str, str]) -> Iterator[Message]:
        known = self.rng.choice(tuple(told)) if told and self.rng.random() < 0.85 else None
        kind = known or self.rng.choice(("name", "city", "color", "animal"))
        question, answer, unknown = {
            "name": ("What is my name?", "Your name is {}.", "You have not told me your name yet."),
            "city": ("Where do I live?", "You live in {}.", "You have not told me where you live."),
            "color": ("What is my favorite color?", "Your favorite color is {}.",
                      "You have not told me your favorite color."),
            "animal": ("What pet do I have?", "Your pet is a {}.", "You have not told me about a pet."),
        }[kind]  # fmt: skip
        yield Message("user", self._varied(question))
        yield Message("assistant", answer.format(told[kind]) if kind in told else unknown)

    def _tool_turn(self) -> Iterator[Message]:
        city, number = self.rng.choice(self.corpus.words["city"]), self.rng.randint(0, 30)
        yield Message("user", f"How warm is it in {city}?")
        yield Message("tool", f'{{"city": "{city}", "degrees": {number}}}')
        yield Message("assistant", f"It is {number} degrees in {city}.")

    def _question(self, entry: Entry) -> str:
        if entry.topics and (not entry.questions or self.rng.random() < 0.5):
            text = self.rng.choice(TOPIC_QUESTIONS).format(self.rng.choice(entry.topics))
        else:
            text = self.rng.choice(entry.questions)
        return text[0].upper() + text[1:]

    def _varied(self, text: str, *, lower: bool = True) -> str:
        """The same request as people really type it."""
        draw = self.rng.random()
        if draw < 0.12:
            return self.rng.choice(OPENINGS) + text
        if draw < 0.18:
            return text + self.rng.choice(CLOSINGS)
        if draw < 0.24:
            return text.rstrip("?.")
        if lower and draw < 0.36:
            return text.lower() if draw < 0.30 else text.lower().rstrip("?.")
        return text

    def _system_part(self, style: float) -> str:
        """One sentence or paragraph; `style` in [0, 1) sets the mixture of this text."""
        draw = self.rng.random()
        if draw < 0.5 * style:
            return self.rng.choice(self._noise)()
        if draw < 0.75:
            return self._slots(self.rng.choice(self.corpus.instructions))
        if draw < 0.87:
            return self.prose()
        return self.rng.choice(self.rng.choice(self.corpus.entries).answers)

    def _slots(self, text: str) -> str:
        for slot in ("noun", "verb", "adjective", "city", "name"):
            while f"{{{slot}}}" in text:
                text = text.replace(f"{{{slot}}}", self.rng.choice(self.corpus.words[slot]), 1)
        return text.replace("{number}", str(self.rng.randint(1, 999)))

    def _unknown_thing(self) -> str:
        draw = self.rng.random()
        noun = self._pseudo_word() if draw < 0.3 else self.rng.choice(self.corpus.words["noun"])
        if draw > 0.7:
            noun = f"{self.rng.choice(self.corpus.words['adjective'])} {noun}"
        return self.rng.choice(("a {}", "the {}", "{}", "{}s", "the {} of {city}")).replace(
            "{city}", self.rng.choice(self.corpus.words["city"])
        ).format(noun)  # fmt: skip

    def _grammar_sentence(self) -> str:
        form = self.rng.choice((
            "The {adjective} {noun} {verb}s the {noun}.", "{name} and {name} {verb} a {adjective} {noun} in {city}.",
            "Write a {adjective} {noun} about the {noun} of {city}.", "How do I {verb} the {noun}?",
            "Why does a {noun} {verb} {number} {adjective} {noun}s?", "Should {name} {verb} every {noun}?",
            "Summarize the {noun} and {verb} the {adjective} {noun}.", "When the {noun} is {adjective}, {verb} it.",
            "Item {number}: {adjective} {noun}, {noun}, {noun}.", "Do not {verb} the {noun} before {number}.",
        ))  # fmt: skip
        return self._slots(form)

    def _word_soup(self) -> str:
        kinds = ("noun", "verb", "adjective", "other")
        return " ".join(
            self.rng.choice(self.corpus.words[self.rng.choice(kinds)]) for _ in range(self.rng.randint(3, 20))
        )

    def _identifiers(self) -> str:
        forms = ("{:08x}", "id-{}", "#{}", "{:x}", "user_{}", "{}", "0x{:04x}", "v{}")
        return " ".join(
            self.rng.choice(forms).format(self.rng.getrandbits(self.rng.choice((8, 16, 32))))
            for _ in range(self.rng.randint(1, 5))
        )

    def _json_line(self) -> str:
        return self._slots(
            '{"type": "function", "function": {"name": "{verb}_{noun}", "description": "{verb} the {noun}", '
            '"parameters": {"type": "object", "properties": {"{noun}": {"type": "string"}}}}}'
        )

    def _pseudo_word(self) -> str:
        return "".join(self.rng.choice(PSEUDO_SYLLABLES) for _ in range(self.rng.randint(2, 4)))

    def _pseudo_sentence(self) -> str:
        words = (self._pseudo_word() for _ in range(self.rng.randint(2, 10)))
        return " ".join(words).capitalize() + self.rng.choice(".?! ").rstrip()
