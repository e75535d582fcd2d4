"""Dialogues: an endless, seeded supply of chats, combined from the texts in `corpus/`.

Owns the grammar of the combinations: turns, system prompts, noise.
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
SIGNS = {"plus": "+", "minus": "-"}
OTHER_CHARACTERS = (
    "абвгдежзийклмнопрстуфхцчшщыэюяαβγδεζηθλμπσφω日本語今天気人大学中国東京مرحباسلام🙂👋🎉🚀🌍❤🔥👍éüøåñç"
)
CODE_FORMS = (
    "def {verb}_{noun}({noun}): return {noun} + {number}",
    "for {noun} in range({number}): {verb}({noun})",
    "x = {number}; y = x * {number}",
    "SELECT {noun} FROM {noun}s WHERE {noun} = {number};",
    "{verb} --{noun} {number} ./{noun}/{noun}.txt",
    "if ({noun} < {number}) { {verb}({noun}); }",
    "<{noun} id='{number}'>{verb}</{noun}>",
    "https://{noun}.example/{noun}/{number}?{verb}={adjective}",
)


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
        """Return a system prompt of about this many words; it does not affect the answers."""
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
        """Yield user and assistant messages in turn; facts that the user told are asked back."""
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
            else:
                yield from self._known_turn()

    def _known_turn(self) -> Iterator[Message]:
        is_talk = self.rng.random() < 0.15
        entry = self.rng.choice(self.corpus.small_talk if is_talk else self.corpus.entries)
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
            text = " ".join(self._noise() for _ in range(self.rng.choice((1, 1, 1, 2))))
        yield Message("user", text)
        yield Message("assistant", self.rng.choice(self.corpus.fallbacks))

    def _arithmetic_turn(self) -> Iterator[Message]:
        left, right = self.rng.randint(0, 9), self.rng.randint(0, 9)
        word = self.rng.choice(("plus", "plus", "minus"))
        if word == "minus":
            left, right = max(left, right), min(left, right)
        result = left + right if word == "plus" else left - right
        if self.rng.random() < 0.15:
            a, b, c = (NUMBER_WORDS[number] for number in (left, right, result))
            question, answer = f"{a} {word} {b}", f"{a.capitalize()} {word} {b} is {c}."
        else:
            signs = (f" {word} ", SIGNS[word], f" {SIGNS[word]} ")
            question, answer = f"{left}{self.rng.choice(signs)}{right}", f"{left} {word} {right} is {result}."
        form = self.rng.choice(
            ("What is {}?", "What is {}?", "How much is {}?", "{}?", "{} =", "{}", "Calculate {}.")
        )
        yield Message("user", form.format(question))
        yield Message("assistant", answer)

    def _telling_turn(self, told: dict[str, str]) -> Iterator[Message]:
        memory = self.rng.choice(self.corpus.memories)
        value = told[memory.kind] = self.rng.choice(self.corpus.words[memory.kind])
        yield Message("user", self.rng.choice(memory.tellings).format(value))
        yield Message("assistant", self.rng.choice(memory.replies).format(value))

    def _asking_back_turn(self, told: dict[str, str]) -> Iterator[Message]:
        known = [memory for memory in self.corpus.memories if memory.kind in told]
        is_known = self.rng.random() < 0.9
        if is_known and not known:
            yield from self._telling_turn(told)
            return
        memory: Memory = self.rng.choice(known if is_known else self.corpus.memories)
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
        if draw < 0.35:
            return self._slots(self.rng.choice(self.corpus.sentences))
        if draw < 0.5:
            return self._word_soup()
        if draw < 0.62:
            return self._identifiers()
        if draw < 0.7:
            return self._slots(TOOL_FORM)
        if draw < 0.8:
            return self._slots(self.rng.choice(CODE_FORMS))
        return self._foreign_text() if draw < 0.9 else self._pseudo_sentence()

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

    def _foreign_text(self) -> str:
        start = self.rng.randrange(len(OTHER_CHARACTERS))
        nearby = OTHER_CHARACTERS[start : start + 24]
        words = (
            "".join(self.rng.choices(nearby, k=self.rng.randint(1, 7))) for _ in range(self.rng.randint(1, 6))
        )
        return " ".join(words)

    def _pseudo_word(self) -> str:
        return "".join(self.rng.choices(PSEUDO_SYLLABLES, k=self.rng.randint(2, 4)))

    def _pseudo_sentence(self) -> str:
        words = " ".join(self._pseudo_word() for _ in range(self.rng.randint(2, 10)))
        return words.capitalize() + self.rng.choice((".", "?", "!", ""))
