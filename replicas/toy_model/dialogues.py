"""Dialogues: an endless, seeded supply of chats, combined from the texts in `corpus/`.

Owns the grammar of the combinations: turns, system prompts, noise. Knows nothing of files, tokens,
models or training.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from replicas.toy_model.corpus_texts import Corpus, Entry, Memory

NUMBER_WORDS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
)  # fmt: skip
PSEUDO_SYLLABLES = (
    "ba", "ko", "ri", "tun", "mel", "zor", "fi", "plex", "gra", "no", "wim", "sta", "qu", "ly", "dax", "pho",
)  # fmt: skip
UNKNOWN_FORMS = ("a {}", "the {}", "{}", "{}s", "my {}", "the {} of {{city}}")
IDENTIFIER_FORMS = ("{:08x}", "id-{}", "#{}", "{:x}", "user_{}", "{}", "0x{:04x}", "v{}")
TOOL_FORM = (
    '{"type": "function", "function": {"name": "{verb}_{noun}", "description": "{verb} the {noun}", '
    '"parameters": {"type": "object", "properties": {"{noun}": {"type": "string"}}}}}'
)
OPERATIONS = ("plus", "plus", "plus", "minus", "minus", "times")
SIGNS = {"plus": "+", "minus": "-", "times": "*"}


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    text: str


@dataclass(slots=True)
class Dialogues:
    """Draws texts and turns; the same seed and the same calls give the same dialogues."""

    corpus: Corpus
    rng: random.Random
    _unknown_nouns: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        known = {
            word for entry in self.corpus.entries for topic in entry.topics for word in topic.lower().split()
        }
        self._unknown_nouns = tuple(
            noun for noun in self.corpus.words["noun"] if noun not in known and f"{noun}s" not in known
        )

    def system_text(self, num_words: int) -> str:
        """A system prompt of about so many words; what it says has no bearing on the answers."""
        parts = [self.rng.choice(self.corpus.system_lines)] if self.rng.random() < 0.7 else []
        if self.rng.random() < 0.1:
            tools = [self._slots(TOOL_FORM) for _ in range(self.rng.randint(1, 3))]
            parts = ["\n".join(("You may call these tools:", *tools)) + "\n\n", *parts]
        num = sum(len(part.split()) for part in parts)
        noise_ratio = 0.5 * self.rng.random()
        while num < num_words:
            part = self._filler(noise_ratio)
            parts.append(part)
            num += len(part.split())
        return self.rng.choice((" ", " ", "\n", "\n- ")).join(parts) or self.corpus.system_lines[0]

    def prose(self) -> str:
        return self.rng.choice(self.corpus.paragraphs)

    def turns(self, num_turns: int) -> Iterator[Message]:
        """User and assistant messages in turn; facts that the user told are asked back."""
        told: dict[str, str] = {}
        for _ in range(num_turns):
            draw = self.rng.random()
            if draw < 0.07:
                yield from self._telling_turn(told)
            elif draw < 0.14:
                yield from self._asking_back_turn(told)
            elif draw < 0.23:
                yield from self._arithmetic_turn()
            elif draw < 0.35:
                yield from self._fallback_turn()
            elif draw < 0.40:
                yield from self._document_turn()
            elif draw < 0.42:
                yield from self._tool_turn()
            elif draw < 0.47:
                yield from self._repeating_turn()
            else:
                yield from self._known_turn()

    def _known_turn(self) -> Iterator[Message]:
        entry = self.rng.choice(self.corpus.entries)
        yield Message("user", self._varied(self._question(entry)))
        yield Message("assistant", self.rng.choice(entry.answers))

    def _document_turn(self) -> Iterator[Message]:
        """A question after a text of the user's own."""
        entry = self.rng.choice(self.corpus.entries)
        noise_ratio = 0.5 * self.rng.random()
        text = " ".join(self._filler(noise_ratio) for _ in range(self.rng.randint(1, 4)))
        yield Message("user", f"{text}{self.rng.choice((' ', chr(10), chr(10) * 2))}{self._question(entry)}")
        yield Message("assistant", self.rng.choice(entry.answers))

    def _fallback_turn(self) -> Iterator[Message]:
        if self.rng.random() < 0.5:
            text = self._varied(self.rng.choice(self.corpus.topic_questions).format(self._unknown_thing()))
        else:
            text = " ".join(self._noise() for _ in range(self.rng.choice((1, 1, 1, 2, 4))))
        yield Message("user", text)
        yield Message("assistant", self.rng.choice(self.corpus.fallbacks))

    def _arithmetic_turn(self) -> Iterator[Message]:
        left, right = self.rng.randint(0, 10), self.rng.randint(0, 10)
        word = self.rng.choice(OPERATIONS)
        if word == "minus":
            left, right = max(left, right), min(left, right)
        result = {"plus": left + right, "minus": left - right, "times": left * right}[word]
        if result < len(NUMBER_WORDS) and self.rng.random() < 0.25:
            a, b, c = (NUMBER_WORDS[number] for number in (left, right, result))
            question, answer = f"{a} {word} {b}", f"{a.capitalize()} {word} {b} is {c}."
        else:
            sign = SIGNS[word]
            question = self.rng.choice(
                (f"{left} {word} {right}", f"{left}{sign}{right}", f"{left} {sign} {right}")
            )
            answer = f"{left} {word} {right} is {result}."
        form = self.rng.choice(
            ("What is {}?", "What is {}?", "How much is {}?", "{}?", "{} =", "{}", "Calculate {}.")
        )
        yield Message("user", form.format(question))
        yield Message("assistant", answer)

    def _telling_turn(self, told: dict[str, str]) -> Iterator[Message]:
        memory = self.rng.choice(self.corpus.memories)
        is_invented = memory.kind in ("name", "noun") and self.rng.random() < 0.4
        value = self._pseudo_word() if is_invented else self.rng.choice(self.corpus.words[memory.kind])
        told[memory.kind] = value = value.capitalize() if memory.kind == "name" else value
        yield Message("user", self.rng.choice(memory.tellings).format(value))
        yield Message("assistant", self.rng.choice(memory.replies).format(value))

    def _asking_back_turn(self, told: dict[str, str]) -> Iterator[Message]:
        known = [memory for memory in self.corpus.memories if memory.kind in told]
        choices = known if known and self.rng.random() < 0.9 else self.corpus.memories
        memory: Memory = self.rng.choice(choices)
        yield Message("user", self._varied(self.rng.choice(memory.questions)))
        if memory.kind in told:
            yield Message("assistant", memory.answer.format(told[memory.kind]))
        else:
            yield Message("assistant", memory.unknown)

    def _tool_turn(self) -> Iterator[Message]:
        city, number = self.rng.choice(self.corpus.words["city"]), self.rng.randint(0, 30)
        yield Message("user", f"How warm is it in {city}?")
        yield Message("tool", f'{{"city": "{city}", "degrees": {number}}}')
        yield Message("assistant", f"It is {number} degrees in {city}.")

    def _repeating_turn(self) -> Iterator[Message]:
        kinds = ("noun", "adjective", "verb", "name", "city", "color")
        words = [
            self._pseudo_word() if self.rng.random() < 0.2 else self.rng.choice(self.corpus.words[kind])
            for kind in self.rng.choices(kinds, k=self.rng.randint(2, 8))
        ]
        text = " ".join(words)
        yield Message("user", self.rng.choice(self.corpus.repeat_requests).format(text))
        yield Message("assistant", text)

    def _question(self, entry: Entry) -> str:
        if entry.topics and (not entry.questions or self.rng.random() < 0.5):
            text = self.rng.choice(self.corpus.topic_questions).format(self.rng.choice(entry.topics))
        else:
            text = self.rng.choice(entry.questions)
        return text[0].upper() + text[1:]

    def _varied(self, text: str) -> str:
        """The same request as people really type it."""
        draw = self.rng.random()
        if draw < 0.12:
            opening = self.rng.choice(self.corpus.openings)
            return f"{opening} {text if opening[-1] in '.!:' else text[0].lower() + text[1:]}"
        if draw < 0.17:
            return f"{text} {self.rng.choice(self.corpus.closings)}"
        if draw < 0.24:
            return text.rstrip("?.")
        if draw < 0.36:
            return text.lower() if draw < 0.30 else text.lower().rstrip("?.")
        return text

    def _filler(self, noise_ratio: float) -> str:
        """A sentence or paragraph of a text that does not matter."""
        if self.rng.random() < noise_ratio:
            return self._noise()
        draw = self.rng.random()
        if draw < 0.7:
            return self._slots(self.rng.choice(self.corpus.instructions))
        return self.prose() if draw < 0.85 else self.rng.choice(self.rng.choice(self.corpus.entries).answers)

    def _noise(self) -> str:
        draw = self.rng.random()
        if draw < 0.4:
            return self._slots(self.rng.choice(self.corpus.sentences))
        if draw < 0.6:
            return self._word_soup()
        if draw < 0.75:
            return self._identifiers()
        if draw < 0.85:
            return self._slots(TOOL_FORM)
        return self._pseudo_sentence()

    def _slots(self, text: str) -> str:
        for slot in ("noun", "verb", "adjective", "city", "name"):
            while f"{{{slot}}}" in text:
                text = text.replace(f"{{{slot}}}", self.rng.choice(self.corpus.words[slot]), 1)
        return text.replace("{number}", str(self.rng.randint(1, 999)))

    def _unknown_thing(self) -> str:
        draw = self.rng.random()
        noun = self._pseudo_word() if draw < 0.3 else self.rng.choice(self._unknown_nouns)
        if draw > 0.7:
            noun = f"{self.rng.choice(self.corpus.words['adjective'])} {noun}"
        return self._slots(self.rng.choice(UNKNOWN_FORMS).format(noun))

    def _word_soup(self) -> str:
        kinds = self.rng.choices(("noun", "verb", "adjective", "other"), k=self.rng.randint(3, 20))
        return " ".join(self.rng.choice(self.corpus.words[kind]) for kind in kinds)

    def _identifiers(self) -> str:
        return " ".join(
            self.rng.choice(IDENTIFIER_FORMS).format(self.rng.getrandbits(self.rng.choice((8, 16, 32))))
            for _ in range(self.rng.randint(1, 5))
        )

    def _pseudo_word(self) -> str:
        return "".join(self.rng.choices(PSEUDO_SYLLABLES, k=self.rng.randint(2, 4)))

    def _pseudo_sentence(self) -> str:
        words = " ".join(self._pseudo_word() for _ in range(self.rng.randint(2, 10)))
        return words.capitalize() + self.rng.choice((".", "?", "!", ""))
