"""ModelCatalog: the models that can be asked for, each with its text side and its namespaces.

Owns the cluster secret, and so every namespace root. Knows nothing of replicas, of routes or of
requests: membership adds a model when its first replica is described.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from replicas.protocol.blocks import BlockHash, Namespace, namespace_root
from replicas.protocol.status import ModelCard, TokenizerBundle
from router.errors import NoReplicaAvailable, UnknownModel
from router.prompt.quoting import Quoter
from router.prompt.template import ChatTemplate
from router.prompt.tokenizer import DEFAULT_CACHE_BYTES, Tokenizer

NUM_CACHED_ROOTS = 4096


class ServedModel:
    """One model: its card, its tokenizer, its chat template, the roots of its block chains."""

    def __init__(
        self, card: ModelCard, tokenizer: Tokenizer, template: ChatTemplate, secret: bytes, created: int
    ) -> None:
        self.card = card
        self.tokenizer = tokenizer
        self.template = template
        self.quoter = Quoter(tokenizer.special_tokens)
        self.created = created
        self.eos_token_ids = frozenset(card.eos_token_ids)
        fingerprint = bytes.fromhex(card.fingerprint)

        @lru_cache(maxsize=NUM_CACHED_ROOTS)
        def root(tenant: str | None, salt: str | None) -> BlockHash:
            namespace = Namespace(fingerprint, card.block_size, tenant=tenant, salt=salt)
            return namespace_root(secret, namespace)

        self._root = root

    def root(self, tenant: str | None = None, salt: str | None = None) -> BlockHash:
        """The root of every chain of this tenant and salt; nobody without the secret can compute it."""
        return self._root(tenant, salt)


@dataclass(frozen=True, slots=True)
class _TextSide:
    digest: bytes
    tokenizer: Tokenizer
    template: ChatTemplate


class ModelCatalog:
    def __init__(self, secret: bytes, *, cache_bytes: int = DEFAULT_CACHE_BYTES) -> None:
        self._secret = secret
        self._cache_bytes = cache_bytes
        self._models: dict[str, ServedModel] = {}
        self._text_sides: dict[str, _TextSide] = {}

    def add(self, card: ModelCard, bundle: TokenizerBundle, *, created: int = 0) -> None:
        """Serve `card` under its name, in place of an earlier card. Takes seconds for a large
        vocabulary: call it in a thread. Raises TokenizerError."""
        digest = _digest(bundle)
        known = self._text_sides.get(card.name)
        if known is None or known.digest != digest:
            tokenizer = Tokenizer(bundle, cache_bytes=self._cache_bytes)
            known = _TextSide(digest, tokenizer, ChatTemplate.from_bundle(bundle))
        model = ServedModel(card, known.tokenizer, known.template, self._secret, created)
        self._text_sides[card.name] = known
        self._models[card.name] = model

    def get(self, name: str) -> ServedModel:
        """Raises UnknownModel; NoReplicaAvailable while no model at all is known.

        So a router that has just started sends nobody away for good.
        """
        model = self._models.get(name)
        if model is None and not self._models:
            raise NoReplicaAvailable("No replica is known yet. Try again shortly.")
        if model is None:
            raise UnknownModel(f"The model '{name[:200]}' does not exist or is not served here.")
        return model

    def names(self) -> Sequence[str]:
        return sorted(self._models)


def _digest(bundle: TokenizerBundle) -> bytes:
    digest = hashlib.sha256()
    for name in sorted(bundle.files):
        for part in (name.encode(), bundle.files[name]):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.digest()
