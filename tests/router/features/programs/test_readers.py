"""Which program a request belongs to, by what agents send."""

import json

import pytest
from msgspec import structs

from router.encoded import EncodedHistory
from router.features.programs.readers import MAX_JSON_BYTES, MAX_VALUE_BYTES, Readers, conversation_name
from router.programs.name import ProgramName

SESSION = "0b5f7f0e-3c5e-4a59-9a0a-8f5a3a1f2b1c"
CODEX_TURN = json.dumps({"turn_id": "t1", "request_kind": "turn", "agent_name": "/root"})
CODEX_COMPACTION = json.dumps({"request_kind": "compaction"})


def read(*headers: tuple[str, str], own: tuple[str, ...] = (), **body: object) -> ProgramName | None:
    sent = [(b"accept", b"*/*"), *((name.encode(), value.encode("latin-1")) for name, value in headers)]
    return Readers(own).named(sent, **{"offers_tools": True, **body})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        (
            [("x-claude-code-session-id", SESSION), ("x-claude-code-request-class", "main")],
            ProgramName("claude-code", "x-claude-code-session-id", SESSION),
        ),
        (
            [("x-claude-code-session-id", SESSION), ("x-claude-code-agent-id", "a1")],
            ProgramName("claude-code", "x-claude-code-session-id", SESSION, "a1", ""),
        ),
        (
            [
                ("x-claude-code-session-id", SESSION),
                ("x-claude-code-agent-id", "a2"),
                ("x-claude-code-parent-agent-id", "a1"),
                ("x-claude-code-request-class", "subagent"),
            ],
            ProgramName("claude-code", "x-claude-code-session-id", SESSION, "a2", "a1"),
        ),
        (
            [("x-claude-code-session-id", SESSION), ("x-claude-code-request-class", "compaction")],
            ProgramName("claude-code", "x-claude-code-session-id", SESSION, is_side=True),
        ),
        (
            [
                ("session-id", SESSION),
                ("thread-id", SESSION),
                ("x-codex-turn-metadata", CODEX_TURN),
            ],
            ProgramName("codex", "session-id", SESSION),
        ),
        (
            [
                ("session-id", SESSION),
                ("thread-id", "t9"),
                ("x-codex-parent-thread-id", SESSION),
                ("x-codex-turn-metadata", CODEX_TURN),
            ],
            ProgramName("codex", "session-id", SESSION, "t9", ""),
        ),
        (
            [("session-id", SESSION), ("x-codex-turn-metadata", CODEX_COMPACTION)],
            ProgramName("codex", "session-id", SESSION, is_side=True),
        ),
        (
            [("x-session-affinity", "ses_1"), ("x-session-id", "ses_1")],
            ProgramName("opencode", "x-session-affinity", "ses_1"),
        ),
        (
            [("x-opencode-session", "ses_2"), ("x-parent-session-id", "ses_1")],
            ProgramName("opencode", "x-opencode-session", "ses_2", "", "", "ses_1"),
        ),
        (
            [
                ("x-kvasir-program", "p"),
                ("x-kvasir-agent", "a"),
                ("x-kvasir-parent-agent", "b"),
                ("x-claude-code-session-id", SESSION),
            ],
            ProgramName("kvasir", "x-kvasir-program", "p", "a", "b"),
        ),
    ],
)
def test_each_agents_headers_name_its_program(headers: list[tuple[str, str]], expected: ProgramName) -> None:
    assert read(*headers) == expected


def test_a_subagents_parent_is_the_program_of_its_session() -> None:
    main = read(("x-claude-code-session-id", SESSION))
    child = read(("x-claude-code-session-id", SESSION), ("x-claude-code-agent-id", "a1"))
    opencode, opencode_child = (
        read(("x-session-id", "ses_1")),
        read(("x-session-affinity", "ses_2"), ("x-parent-session-id", "ses_1")),
    )
    assert main is not None and child is not None
    assert child.parent_key("m", "t") == main.key("m", "t") != child.key("m", "t")
    assert opencode is not None and opencode_child is not None
    assert opencode_child.parent_key("m", "t") == opencode.key("m", "t")


def test_the_operators_headers_come_first_and_the_bodys_fields_last() -> None:
    claude = ("x-claude-code-session-id", SESSION)
    assert read(claude, ("x-our-chat", "c7"), own=("X-Our-Chat",)) == ProgramName(
        "header", "x-our-chat", "c7"
    )
    user = json.dumps({"device_id": "d", "account_uuid": "", "session_id": SESSION})
    body = {"end_user": user, "prompt_cache_key": "k"}
    assert read(claude, **body) == ProgramName("claude-code", "x-claude-code-session-id", SESSION)
    assert read(**body) == ProgramName("claude-code", "metadata.user_id", SESSION)
    assert read(**{**body, "end_user": "somebody"}) == ProgramName(
        "prompt_cache_key", "prompt_cache_key", "k"
    )
    assert read() is None


def test_a_conversation_has_one_name_as_it_goes_on_and_another_beginning_another() -> None:
    head, question, answer, more = (bytes([number]) * 32 for number in range(4))
    first = conversation_name(EncodedHistory([head, question, answer, more], answers=[1]))
    later = conversation_name(EncodedHistory([head, question, answer, more, answer, more], answers=[1, 3]))
    assert first is not None and first == later and first.source == "conversation"
    assert conversation_name(EncodedHistory([head, more, answer, more], answers=[1])) not in (None, first)


def test_a_question_that_may_never_be_gone_on_with_is_no_program() -> None:
    assert conversation_name(EncodedHistory([b"head", b"question"])) is None


@pytest.mark.parametrize(
    "headers",
    [
        ["x-claude-code-session-id"],
        ["session-id", "thread-id"],
        ["x-session-affinity", "x-session-id"],
        ["x-opencode-session"],
    ],
)
def test_an_agents_request_without_tools_is_a_call_beside_its_turns(headers: list[str]) -> None:
    sent = [(header, SESSION) for header in headers]
    titled, turn = read(*sent, offers_tools=False), read(*sent)
    assert titled is not None and titled.is_side
    assert turn is not None and not turn.is_side


@pytest.mark.parametrize("header", ["x-kvasir-program", "x-session-id", "session-id"])
def test_a_header_that_other_clients_send_as_well_names_turns_without_tools(header: str) -> None:
    found = read((header, SESSION), offers_tools=False)
    assert found is not None and not found.is_side


def test_a_subagent_whose_id_cannot_be_read_is_not_taken_for_its_parent() -> None:
    session, agent = ("x-claude-code-session-id", SESSION), ("x-claude-code-agent-id", "a" * 300)
    assert read(session, agent) is None
    assert read(session, ("x-claude-code-agent-id", "a"), ("x-claude-code-parent-agent-id", "")) is None


@pytest.mark.parametrize("value", ["", " ", "x" * (MAX_VALUE_BYTES + 1), "a\x00b", "a\nb", "a\x7f"])
def test_a_value_that_is_no_name_is_ignored_and_counted(value: str) -> None:
    readers = Readers()
    sent = [(b"x-claude-code-session-id", value.encode()), (b"x-session-id", b"ses_1")]
    assert readers.named(sent, offers_tools=True) == ProgramName("opencode", "x-session-id", "ses_1")
    assert readers.num_unreadable == 1
    assert readers.named([], prompt_cache_key=value, offers_tools=True) is None


@pytest.mark.parametrize(
    "text", ["[" * 4000, '{"session_id": 3}', '{"session_id": ""}', "{", '{"a": {}}', "{" * 9999]
)
def test_json_that_names_nothing_or_never_ends_does_no_harm(text: str) -> None:
    assert read(end_user=text) is None
    found = read(("session-id", SESSION), ("x-codex-turn-metadata", text[:MAX_JSON_BYTES]))
    assert found == ProgramName("codex", "session-id", SESSION)


def test_of_a_header_that_comes_twice_the_first_counts() -> None:
    found = read(("x-session-id", "first"), ("x-session-id", "second"))
    assert found is not None and found.session == "first"
    assert read(("x-session-id", ""), ("x-session-id", "second")) is None


def test_tenants_and_models_never_share_a_key() -> None:
    name = ProgramName("codex", "session-id", SESSION, "a")
    keys = {name.key(model, tenant) for model in ("m", "n") for tenant in ("s", "t")}
    assert len(keys | {structs.replace(name, salt="s").key("m", "t")}) == 5
    assert ProgramName("c", "f", "ab", "c").key("m", "t") != ProgramName("c", "f", "a", "bc").key("m", "t")
    assert name.key("m", "t").hex() == ProgramName("codex", "other field", SESSION, "a").key("m", "t").hex()
