"""Docstrings, documents, errors and help are written in plain English, by a list of what is banned."""

import ast
import re
from collections.abc import Iterator

import pytest

from docs.make_file_map import ROOT, source_files, tracked_files

BANNED_WORDS = re.compile(
    r"\b(whoever|whomever|nobody|so many|so much as|such as (?:is|are|it is)|as good as|but for|as far as"
    r"|shelf|desks?|bereaved|mourn\w*)\b",
    re.IGNORECASE,
)
BANNED_BEGINNINGS = re.compile(
    r"((?:(?:For|By|In|To|With) which)|That which|Which|Of|What|Who(?:se)?|Where|When|As|Those|That|So"
    r"|One that|There|They) "
)
NO_VERBS = re.compile(r"(The|A|An|For|In) ")
"""How docstrings of functions begin that should begin with a verb."""
SHY_WORDS = re.compile(r"\b((?:for|of) what|told|lately|beside)\b", re.IGNORECASE)
"""Words that hide the noun."""
LEFT = {"no verb": 250, "shy word": 574}
"""How many are left in code and pages. A change may lower these numbers, and raises none."""
VALUES = re.compile("^nobody$|loopback, everyone or nobody")
"""Values of a setting, which stay what they are."""


def findings_in_python(text: str) -> Iterator[str]:
    """Banned words in all strings, banned beginnings in docstrings."""
    tree = ast.parse(text)
    docstrings = {
        id(node.value): node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from (f"{node.lineno}: “{found}”" for found in BANNED_WORDS.findall(_one_line(node.value)))
            if id(node) in docstrings and (begins := BANNED_BEGINNINGS.match(node.value)):
                yield f"{node.lineno}: begins with “{begins[1]}”"


def _one_line(text: str) -> str:
    return VALUES.sub("", " ".join(text.split()))


def findings_in_markdown(text: str) -> Iterator[str]:
    prose = re.sub(r"```.*?```|`[^`]*`", lambda code: "\n" * code[0].count("\n"), text, flags=re.DOTALL)
    for number, line in enumerate(prose.splitlines(), start=1):
        yield from (f"{number}: “{found}”" for found in BANNED_WORDS.findall(_one_line(line)))


def test_no_docstring_message_or_page_has_a_banned_word() -> None:
    pages = [name for name in tracked_files() if name.endswith(".md") and "/log/" not in name]
    found = [
        f"{name}:{each}"
        for name in [*source_files(), *pages]
        for each in (findings_in_python if name.endswith(".py") else findings_in_markdown)(
            (ROOT / name).read_text(encoding="utf-8")
        )
    ]
    assert not found, "\n".join(found)


def num_without_verb(text: str) -> int:
    """Count docstrings of functions, properties left out, that begin with no verb."""
    return sum(
        NO_VERBS.match(ast.get_docstring(node) or "") is not None
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and not any("property" in ast.unparse(each) for each in node.decorator_list)
    )


def test_ever_fewer_docstrings_lack_a_verb_or_a_noun() -> None:
    code = [(ROOT / name).read_text(encoding="utf-8") for name in source_files() if name.endswith(".py")]
    pages = [name for name in tracked_files() if name.endswith(".md") and "/log/" not in name]
    found = {
        "no verb": sum(map(num_without_verb, code)),
        "shy word": sum(
            len(SHY_WORDS.findall(text))
            for text in [*code, *((ROOT / name).read_text(encoding="utf-8") for name in pages)]
        ),
    }
    assert all(found[kind] <= LEFT[kind] for kind in LEFT), f"{found} are more than {LEFT}"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ('"""Of a prompt, the tokens."""', 1),
        ('"""What is told to nobody."""', 2),
        ('A = 1\n"""Who asks."""', 1),
        ('raise ValueError("whoever asks")', 1),
        ('"""Count the tokens of a prompt.\n\nOf which none is cached."""', 0),
    ],
)
def test_banned_words_are_found(text: str, number: int) -> None:
    assert len(list(findings_in_python(text))) == number


def test_code_in_a_document_is_not_read() -> None:
    assert not list(findings_in_markdown("`nobody`\n```\nwhoever\n```\n"))
    assert list(findings_in_markdown("```\nx\n```\nWhoever asks")) == ["4: “Whoever”"]
