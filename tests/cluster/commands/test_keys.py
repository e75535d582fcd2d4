"""`kvasir keys` on a file: what it makes of it, that two at once lose nothing, and what it refuses."""

import json
import re
import stat
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from cluster.cli import main
from cluster.commands.key_arguments import read_moment
from router.caller import Caller, Limits, Right
from router.errors import KeyFault
from router.features.api_keys import key_document
from router.features.api_keys.key_document import read_document
from router.features.api_keys.key_record import KeyDocument, keyring_of
from tests.redis_server import RedisServer

NOW = datetime.now(UTC).timestamp()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.yaml"


def document(file: Path) -> KeyDocument:
    return read_document(file.read_bytes())


def caller(file: Path, key: str, now: float = NOW) -> Caller | KeyFault:
    return keyring_of(document(file)).find(key, now)


def keys(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["keys", *words]) == 0
    return capsys.readouterr().out.strip()


def complaint(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["keys", *words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    return said.err


def test_a_new_key_is_printed_alone_and_kept_nowhere(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = keys(
        capsys, "create", "--file", str(file), "--tenant", "acme", "--name", "CI", "--right", "explain"
    )
    assert re.fullmatch(r"sk-kvasir-[0-9a-f]{12}-[A-Za-z0-9_-]{43}", key)
    found = caller(file, key)
    assert isinstance(found, Caller)
    assert (found.tenant.name, found.rights) == ("acme", {Right.EXPLAIN})
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert key[-43:] not in file.read_text()
    assert key[-43:] not in keys(capsys, "list", "--file", str(file), "--json")


def test_a_revoked_key_is_unknown(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = [keys(capsys, "create", "--file", str(file), "--tenant", "acme") for _ in range(3)]
    ids = [key.split("-")[2] for key in made]
    keys(capsys, "revoke", "--file", str(file), ids[0], ids[2])
    assert [caller(file, key) is KeyFault.UNKNOWN for key in made] == [True, False, True]
    assert "has no key" in complaint(capsys, "revoke", "--file", str(file), ids[1], ids[0])
    assert isinstance(caller(file, made[1]), Caller)


def test_a_tenant_keeps_what_the_command_does_not_name(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = keys(capsys, "create", "--file", str(file), "--tenant", "acme", "--max-context", "100")
    tenant = ("tenant", "--file", str(file), "acme")
    keys(capsys, *tenant, "--group", "lab", "--group", "staff", "--weight", "2", "--max-sequences", "4")
    keys(capsys, *tenant, "--slo-seconds", "3", "--store-share", "0.5")
    found = document(file).tenants["acme"]
    assert (found.groups, found.weight, found.slo_seconds) == (("lab", "staff"), 2.0, 3.0)
    assert found.limits == Limits(max_sequences=4, store_share=0.5)
    asking = caller(file, key)
    assert isinstance(asking, Caller)
    assert (asking.limits, asking.group) == (Limits(max_context=100), "lab")
    keys(capsys, *tenant, "--group", "none")
    assert document(file).tenants["acme"].groups == ()
    keys(capsys, *tenant, "--remove")
    assert document(file) == KeyDocument({}, ())


def test_the_list_shows_tenants_and_keys(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys(capsys, "tenant", "--file", str(file), "acme", "--weight", "2", "--max-sequences", "4")
    for words in ("--tenant acme --name one", "--tenant beta --name two"):
        keys(capsys, "create", "--file", str(file), *words.split(), "--expires", "2100-01-31")
    text = keys(capsys, "list", "--file", str(file))
    assert "acme: weight=2.0 max_sequences=4" in text
    assert "beta: no limits" in text
    assert re.search(r"[0-9a-f]{12}  acme +one +- +- +20\S+ \S+ +2100-02-01 00:00", text)
    only = json.loads(keys(capsys, "list", "--file", str(file), "--tenant", "beta", "--json"))
    assert [key["name"] for key in only["keys"]] == ["two"]
    assert list(only["tenants"]) == ["beta"]


def test_commands_at_once_lose_nothing(file: Path) -> None:
    words = [sys.executable, "-P", "-m", "cluster.cli", "keys", "create", "--file", str(file), "--tenant"]
    running = [
        subprocess.Popen([*words, f"tenant-{number % 3}"], stdout=subprocess.PIPE, text=True)
        for number in range(8)
    ]
    made = [process.communicate(timeout=100)[0].strip() for process in running]
    assert {process.returncode for process in running} == {0}
    assert all(isinstance(caller(file, key), Caller) for key in made)
    assert len(document(file).keys) == 8
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_what_a_symlink_leads_to_is_changed(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = file.parent / "real.yaml"
    keys(capsys, "create", "--file", str(target), "--tenant", "acme")
    file.symlink_to(target)
    keys(capsys, "create", "--file", str(file), "--tenant", "acme")
    assert file.is_symlink()
    assert len(document(target).keys) == 2


def test_keys_in_redis_are_made_and_revoked_by_several_at_once(
    own_redis: RedisServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("5e" * 32)
    place = ("--redis-url", own_redis.url, "--secret-file", str(secret))
    assert "there are no keys in unix://" in complaint(capsys, "list", *place)
    words = [sys.executable, "-P", "-m", "cluster.cli", "keys", "create", *place, "--tenant", "acme"]
    running = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    made = [process.communicate(timeout=100)[0].strip() for process in running]
    ids = {key.split("-")[2] for key in made}
    listed = json.loads(keys(capsys, "list", *place, "--json"))
    assert {key["key_id"] for key in listed["keys"]} == ids
    gone = ids.pop()
    keys(capsys, "revoke", *place, gone)
    listed = json.loads(keys(capsys, "list", *place, "--json"))
    assert {key["key_id"] for key in listed["keys"]} == ids
    secret.write_text("5f" * 32)
    assert "was not sealed under this cluster's secret" in complaint(capsys, "list", *place)


def test_a_secret_that_others_may_read_is_warned_of(
    own_redis: RedisServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("5e" * 32)
    place = ("--redis-url", own_redis.url, "--secret-file", str(secret))
    for mode in (0o644, 0o600):
        secret.chmod(mode)
        assert main(["keys", "create", *place, "--tenant", "acme"]) == 0
        assert (f"{secret} has mode 0644" in capsys.readouterr().err) == (mode == 0o644)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("create", "--tenant", "a b"), "tenants: 'a b' is not a name"),
        (("create", "--tenant", "a", "--expires", "soon"), "--expires takes a day such as 2027-01-31"),
        (("create", "--tenant", "a", "--expires", "2020-01-31"), "is over already"),
        (("create", "--tenant", "a", "--max-context", "0"), "limits.max_context: 0 is not above zero"),
        (("create", "--tenant", "a", "--name", "a\nb"), "name: this is not a line"),
        (("tenant", "a", "--lease-share", "1.5"), "tenants.a.limits.lease_share: 1.5 is more than the whole"),
        (("tenant", "a", "--weight", "nan"), "tenants.a.weight: nan"),
        (("tenant", "a", "--group", "x", "--group", "x"), "tenants.a.groups: "),
        (("tenant", "a", "--remove"), "there is no file"),
        (("list",), "there is no file"),
        (("revoke", "00aa00aa00aa"), "there is no file"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(
    file: Path, words: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sentence in complaint(capsys, *words, "--file", str(file))
    assert not file.exists()


def test_a_wrong_file_is_not_written_over(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text("keys: [")
    assert f"{file} is wrong: line 2" in complaint(capsys, "create", "--file", str(file), "--tenant", "a")
    assert file.read_text() == "keys: ["


def test_moments() -> None:
    now = datetime(2026, 5, 1, 12, tzinfo=UTC)
    assert read_moment("90d", now) == now + timedelta(days=90)
    assert read_moment("12h", now) == now + timedelta(hours=12)
    assert read_moment("2027-01-31", now) == datetime(2027, 2, 1, tzinfo=UTC)
    assert read_moment("2027-01-31T10:00", now) == datetime(2027, 1, 31, 10, tzinfo=UTC)
    assert read_moment("2027-01-31T10:00+02:00", now) == datetime(2027, 1, 31, 8, tzinfo=UTC)


def test_a_file_that_would_grow_too_large_for_routers_stays_as_it_is(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys(capsys, "create", "--file", str(file), "--tenant", "acme")
    before = file.read_bytes()
    monkeypatch.setattr(key_document, "MAX_YAML_BYTES", len(before) + 10)
    said = complaint(capsys, "create", "--file", str(file), "--tenant", "acme")
    assert f"cannot write {file}: it has " in said and "keys_in_redis" in said
    assert file.read_bytes() == before
