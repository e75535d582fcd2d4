"""Keys of programs: what makes two programs one."""

import msgspec

from router.programs.name import ProgramName

NAME = ProgramName("claude-code", "x-claude-code-session-id", "s1", agent="a1", parent="")


def test_a_key_is_the_same_in_all_routers_and_releases() -> None:
    assert NAME.key("m", "red").hex() == "4ac8ca8d00d8a5497ec4595ba7b9d37d"
    assert NAME.parent_key("m", "red") == ProgramName("claude-code", "other", "s1").key("m", "red")


def test_no_two_programs_have_one_key() -> None:
    """Nor where the parts of one read like those of another one when they are put together."""
    parts = ["", "a", "b", "ab", "\x00", "a\x00", "\ud800", "1"]
    keys = {
        ProgramName(source, "field", session, agent=agent).key(model, tenant)
        for model in parts
        for tenant in parts
        for source in parts
        for session in parts
        for agent in parts
    }
    assert len(keys) == len(parts) ** 5


def test_what_is_no_part_of_its_identity_does_not_change_a_key() -> None:
    other = msgspec.structs.replace(NAME, field="metadata", parent=None, parent_session="s0", is_side=True)
    assert other.key("m", "red") == NAME.key("m", "red")


def test_a_parent_may_have_a_session_of_its_own_and_never_another_tenant() -> None:
    child = ProgramName("opencode", "x", "s2", parent="", parent_session="s1")
    parent = ProgramName("opencode", "x", "s1")
    assert child.parent_key("m", "red") == parent.key("m", "red") != parent.key("m", "green")
    assert parent.parent_key("m", "red") is None
