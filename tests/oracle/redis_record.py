"""What Redis was told: the kinds of writes, and all that lies there at the end, opened."""

import contextlib
import itertools
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import redis
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from replicas.protocol.cluster_secret import Purpose, derive
from tests.oracle.cluster import SECRET
from tests.oracle.exchanges import plain

_WORD = re.compile(rb'"((?:[^"\\]|\\.)*)"')
_WRITES = frozenset(
    b"set setex getset append incr incrby decr decrby del unlink expire pexpire expireat pexpireat persist "
    b"rename hset hdel hincrby sadd srem spop zadd zrem zremrangebyscore zremrangebyrank zincrby xadd xtrim "
    b"xdel lpush rpush lpop rpop publish flushdb flushall eval".split()
)
_OPTIONS = frozenset(b"ex px nx xx gt lt get keepttl maxlen minid ~ = limit".split())
_PARTS = re.compile(r"(?<![a-z])[0-9a-f]{12,}(?:-[0-9a-f]+)?|\b\d+\b")


class Writes:
    """Kinds of writes, by MONITOR, while it is open."""

    def __init__(self, url: str) -> None:
        self._client = redis.Redis.from_url(url, protocol=2)
        self._kinds: set[str] = set()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        with self._client.monitor() as monitor:  # type: ignore[no-untyped-call]
            connection = monitor.connection
            thread = threading.Thread(target=self._follow, args=(connection,), daemon=True)
            thread.start()
            yield
            self._client.set("oracle", "end")
            thread.join(30)
            self._client.delete("oracle")

    def _follow(self, connection: Any) -> None:
        while True:
            words = [found[1] for found in _WORD.finditer(connection.read_response())]
            if words[:2] == [b"SET", b"oracle"]:
                return
            if words and words[0].lower() in _WRITES:
                self._kinds.update(_kinds(words))

    @property
    def kinds(self) -> str:
        return "\n".join(sorted(self._kinds))


def _kinds(words: list[bytes]) -> Iterator[str]:
    """The command, its key without what differs, and options with their times; one for each field's name."""
    command, key, *rest = [word.decode("latin-1") for word in words] + [""] * (2 - len(words))
    parts = [command.upper(), _WRITER.sub("<writer>", _PARTS.sub("#", key))]
    if command.lower() in ("expire", "pexpire"):
        parts.append(_seconds(rest[0], command))
    for word, following in itertools.pairwise([*rest, ""]):
        if word.lower().encode() in _OPTIONS:
            is_time = word.lower() in ("ex", "px")
            parts.append(f"{word.lower()}={_seconds(following, word)}" if is_time else word.lower())
    yield " ".join(parts)
    if command.lower() in ("hset", "xadd", "hdel"):
        yield from (f"{parts[0]} {parts[1]} {word}" for word in rest if re.fullmatch(r"[a-z_]{3,30}", word))


def _seconds(text: str, unit: str) -> str:
    with contextlib.suppress(ValueError):
        seconds = int(text) / (1000 if unit.lower().startswith("p") else 1)
        return f"{round(seconds / 60) * 60 if seconds > 60 else round(seconds)}s"
    return text


def contents(url: str) -> dict[str, str]:
    """Every key without what differs in it, and the values under such keys with what is sealed opened."""
    client: Any = redis.Redis.from_url(url, protocol=2)
    ciphers = [AESGCM(derive(bytes.fromhex(SECRET), purpose)) for purpose in Purpose]
    found: dict[str, list[str]] = {}
    for key in sorted(client.scan_iter(count=1000)):
        name, kind = key.decode(), client.type(key).decode()
        if name.endswith(":news"):  # what has been told to other routers is over within seconds
            continue
        value = _settled(name, _opened(_READERS[kind](client, key), name, ciphers))
        label = f"{_WRITER.sub('<writer>', _PARTS.sub('#', name))}: {kind}"
        text = json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False)
        lasts = "for ever" if client.ttl(key) < 0 else "for a time"
        found.setdefault(label, []).append(f"{lasts}\n{plain(text, None, rounded_seconds=600)}")
    return {label: "\n".join(sorted(texts)) for label, texts in found.items()}


def _settled(name: str, value: Any) -> Any:
    """Without what differs from one recording to the next."""
    if name.endswith(":events"):
        # Where one change ends and the next begins is a matter of the moment.
        whole: dict[str, Any] = {}
        for change in value:
            told = whole.setdefault(change["replica"], {"fields": set(), "added": set()})
            told["fields"] |= change.keys()
            told["added"] |= {*re.findall(".{32}", change["added"])}
        return {key: {name: sorted(each) for name, each in told.items()} for key, told in whole.items()}
    if ":replica:" in name:
        load = {key: type(each).__name__ for key, each in json.loads(value["load"]).items()}
        return {key: each if key in _SAME else "…" for key, each in value.items()} | {"load": load}
    if name.startswith("kvasir-usage:writer"):
        return "…"
    if name.startswith("kvasir-usage:") and isinstance(value, dict):
        return {key.partition(":")[2]: _unpacked(each) for key, each in value.items()}
    return value


_SAME = ("state", "card_digest", "check", "address", "ready")
_WRITER = re.compile("(?<=writer:).*")


def _unpacked(text: str) -> Any:
    try:
        return msgspec.msgpack.decode(bytes.fromhex(text))
    except ValueError:
        return text


_READERS: Mapping[str, Callable[[Any, bytes], Any]] = {
    "string": lambda client, key: client.get(key),
    "hash": lambda client, key: client.hgetall(key),
    "set": lambda client, key: sorted(client.smembers(key)),
    "zset": lambda client, key: client.zrange(key, 0, -1, withscores=True),
    "stream": lambda client, key: [fields for _, fields in client.xrange(key)],
}


def _opened(value: Any, name: str, ciphers: Sequence[AESGCM]) -> Any:
    if isinstance(value, dict):
        return {str(_opened(key, name, ciphers)): _opened(each, name, ciphers) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_opened(each, name, ciphers) for each in value]
    if not isinstance(value, bytes):
        return value
    nonce, sealed = value[5:17], value[17:]  # behind a version and the key's id
    for cipher in ciphers if len(sealed) > 16 else ():
        with contextlib.suppress(InvalidTag):
            return _opened(
                msgspec.msgpack.decode(cipher.decrypt(nonce, sealed, name.encode())), name, ciphers
            )
    with contextlib.suppress(UnicodeDecodeError):
        text = value.decode()
        if text.isprintable():
            return text
    return value.hex()
