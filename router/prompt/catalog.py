"""ModelCatalog: the available models and adapters, each with its text side and its namespaces.

Owns the cluster secret, and so every namespace root and every user's tag. Membership adds a model when its
first replica is described, and reports the cards of its replicas, which have adapters and other names.
"""

import copy
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from replicas.process.complaints import MOST_COMPLAINTS
from replicas.protocol.blocks import (
    BlockHash,
    ImageTokens,
    Namespace,
    PublishedBeginning,
    namespace_root,
)
from replicas.protocol.frames import NO_USER, UserTag
from replicas.protocol.sampling_defaults import SamplingDefaults
from replicas.protocol.status import Adapter, ModelCard, ReplicaId, TokenizerBundle
from router.answers.formats import answer_format
from router.caller import DEFAULT_TENANT
from router.errors import NoReplicaAvailable, about_model, unknown_model
from router.prompt.chains import DEFAULT_CACHE_BYTES as DEFAULT_CHAIN_BYTES
from router.prompt.chains import ChainHasher
from router.prompt.quoting import Quoter
from router.prompt.segments import SegmentCache
from router.prompt.template import ChatTemplate, TemplateVerdict
from router.prompt.text_model import TextModel, TextModels
from router.prompt.tokenizer import DEFAULT_CACHE_BYTES, Tokenizer
from router.shared.instruments import Instrument, counter, gauge

logger = logging.getLogger(__name__)

NUM_CACHED_ROOTS = 4096

USER_TAG_BYTES = 8
TENANT_LABEL_BYTES = 4


class ServedModel:
    """The target of a name: a model, or a model with an adapter.

    Its card, tokenizer and chat template are the model's; the roots of its block chains are its own.
    """

    def __init__(
        self,
        card: ModelCard,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        secret: bytes,
        created: int,
        chains: ChainHasher,
        adapter: Adapter | None = None,
    ) -> None:
        self.card = card
        self.adapter = adapter
        self.tokenizer = tokenizer
        self.template = template
        self.quoter = Quoter(tokenizer.special_tokens)
        self.answer_format = answer_format(template.sources, tokenizer.added_tokens)
        self.name = card.name if adapter is None else adapter.name
        """The name in answers, counts and metrics. A model may be asked for by others as well."""
        fingerprints = [card.fingerprint] + ([adapter.fingerprint] if adapter else [])
        self.system_fingerprint = "_".join(["fp", *(fingerprint[:10] for fingerprint in fingerprints)])
        """Another one whenever the weights that answer are others."""
        self.created = created
        self.eos_token_ids = frozenset(card.eos_token_ids)
        self._secret = secret
        self._chains = chains
        self._adapted: dict[Adapter, ServedModel] = {}
        fingerprint = bytes.fromhex(card.fingerprint)
        variant = None if adapter is None else f"{adapter.name}:{adapter.fingerprint}"

        @lru_cache(maxsize=NUM_CACHED_ROOTS)
        def root(namespace: str | None = None, salt: str | None = None) -> BlockHash:
            return namespace_root(secret, Namespace(fingerprint, card.block_size, variant, namespace, salt))

        @lru_cache(maxsize=NUM_CACHED_ROOTS)
        def tenant_label(salt: str) -> str:
            digest = hashlib.blake2b(
                salt.encode("utf-8", "surrogatepass"),
                key=secret,
                digest_size=TENANT_LABEL_BYTES,
                person=b"kvasir-tenant-v1",
            )
            return f"salt-{digest.hexdigest()}"

        @lru_cache(maxsize=NUM_CACHED_ROOTS)
        def within(namespace: str | None, salt: str | None) -> ServedModel:
            view = copy.copy(self)
            view.tokenizer = tokenizer.within((namespace, salt))
            return view

        @lru_cache(maxsize=NUM_CACHED_ROOTS)
        def bounded(view: ServedModel, context_length: int) -> ServedModel:
            smaller = copy.copy(view)
            smaller.card = replace(card, context_length=context_length)
            return smaller

        self._bounded = bounded
        self._within = within
        self.root = root
        """The root of every chain of a namespace and salt; it takes the secret to compute it."""
        self._tenant_label = tenant_label

    @property
    def sampling_defaults(self) -> Mapping[str, float]:
        """The defaults that are known, by name."""
        defaults = self.card.sampling_defaults
        return {} if defaults is None else defaults.given()

    def with_adapter(self, adapter: Adapter) -> "ServedModel":
        """The same one each time: it remembers its roots."""
        known = self._adapted.get(adapter)
        if known is None:
            known = ServedModel(
                self.card, self.tokenizer, self.template, self._secret, self.created, self._chains, adapter
            )
            self._adapted[adapter] = known
        return known

    def forget_adapter(self, adapter: Adapter) -> None:
        """It is not asked for any more."""
        self._adapted.pop(adapter, None)

    def within(self, namespace: str | None, salt: str | None = None) -> "ServedModel":
        """Return it for prompts of this namespace and salt, whose encoding times reveal nothing about others'
        prompts; the same object each time."""
        if namespace is None and salt is None:
            return self
        return self._within(namespace, salt)

    def bounded(self, max_context: int | None) -> "ServedModel":
        """Return it with room for at most `max_context` tokens; the same object each time."""
        if max_context is None or max_context >= self.card.context_length:
            return self
        return self._bounded(self, max_context)

    def tenant_label(self, salt: str | None) -> str:
        """Return a label for the tenant of this salt without revealing it, where there are no keys; alike for
        all models and routers."""
        return DEFAULT_TENANT if salt is None else self._tenant_label(salt)

    def block_hashes(
        self,
        root: BlockHash,
        packed_tokens: bytes,
        published: PublishedBeginning | None = None,
        media: Sequence[ImageTokens] = (),
    ) -> list[BlockHash]:
        """Hash the prompt's full blocks under a root of this model, as `hash_blocks` does."""
        size = self.card.block_size
        if published is None:
            return self._chains.hash_packed(root, packed_tokens, size, media=media)
        start = published.num_blocks * size
        head, rest = packed_tokens[: start * 4], packed_tokens[start * 4 :]
        hashes = self._chains.hash_packed(published.root, head, size, media=media)
        return hashes + self._chains.hash_packed(
            root, rest, size, parent=hashes[-1], start=start, media=media
        )


@dataclass(frozen=True, slots=True)
class _TextSide:
    digest: bytes
    bundle: TokenizerBundle
    tokenizer: Tokenizer
    template: ChatTemplate


class _NameClaim(NamedTuple):
    """The meaning of a name that is no model's own: the model, or an adapter of it. `replica_id` had it
    last."""

    model: str
    adapter: Adapter | None
    replica_id: ReplicaId

    def __str__(self) -> str:
        if self.adapter is None:
            return f"another name of model {self.model}"
        return f"an adapter of model {self.model} with fingerprint {self.adapter.fingerprint}"


class ModelCatalog:
    """`chains` hashes the prompts of all models: its entries are rooted in their namespaces."""

    def __init__(
        self,
        secret: bytes,
        *,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        chain_bytes: int = DEFAULT_CHAIN_BYTES,
    ) -> None:
        self.chains = ChainHasher(chain_bytes)
        self._secret = secret
        self._cache_bytes = cache_bytes
        self._models: dict[str, ServedModel] = {}
        self._text_sides: dict[str, _TextSide] = {}
        self._states: dict[str, object] = {}
        """By model: what its claims were read from."""
        self._claims: dict[str, dict[tuple[bool, str], _NameClaim]] = {}
        """By model, then by whether it is an adapter, and by the name."""
        self._others: dict[str, _NameClaim] = {}
        self._complaints: set[str] = set()

    def add(
        self,
        card: ModelCard,
        bundle: TokenizerBundle,
        *,
        created: int = 0,
        verdict: TemplateVerdict | None = None,
    ) -> None:
        """Serve `card` under its name, in place of an earlier card. Takes seconds for a large
        vocabulary: call it in a thread. Raises TokenizerError. Without a verdict on it the chat template is
        tried out here and now."""
        digest = bundle_digest(bundle)
        known = self._text_sides.get(card.name)
        if known is None or known.digest != digest:
            tokenizer = Tokenizer(bundle, cache_bytes=self._cache_bytes)
            template = ChatTemplate.from_bundle(bundle, verdict=verdict)
            known = _TextSide(digest, bundle, tokenizer, template)
        model = ServedModel(card, known.tokenizer, known.template, self._secret, created, self.chains)
        self._text_sides[card.name] = known
        self._models[card.name] = model

    def set_cards(self, model_name: str, cards: Sequence[tuple[ReplicaId, ModelCard]]) -> None:
        """Set what may differ among a model's replicas, by the cards of those that take requests, the newest
        last. The last one's sampling defaults hold, and of two adapters with one name the later is served. A
        name without replicas stays known, as a model does, until the replica that had it last is there
        without it.

        A model's name is never another's. Of several claims to one, another name of a model goes before an
        adapter, and then the first model by name has it, so that all routers agree.
        """
        if cards:
            self._set_sampling(model_name, cards[-1][1].sampling_defaults)
        state = len(self._models), tuple(cards)
        if self._states.get(model_name) == state:
            return
        self._states[model_name] = state
        present = {replica_id for replica_id, _ in cards}
        claims = self._claims[model_name] = {
            (known.adapter is not None, name): known
            for name, known in self._others.items()
            if known.model == model_name and known.replica_id not in present
        }
        for replica_id, card in cards:
            claims |= {(False, alias): _NameClaim(model_name, None, replica_id) for alias in card.aliases}
            claims |= {(True, each.name): _NameClaim(model_name, each, replica_id) for each in card.adapters}
        served = self._served_claims()
        for name, served_claim in served.items():
            self._serve(name, served_claim)
        for name in self._others.keys() - served.keys():
            self._serve(name, None)

    def _set_sampling(self, model_name: str, defaults: SamplingDefaults | None) -> None:
        model = self._models[model_name]
        if model.card.sampling_defaults != defaults:
            logger.info("sampling model=%s by the defaults of its newest replica: %s", model_name, defaults)
            card = replace(model.card, sampling_defaults=defaults)
            self._models[model_name] = ServedModel(
                card, model.tokenizer, model.template, self._secret, model.created, self.chains
            )

    def _served_claims(self) -> Mapping[str, _NameClaim]:
        served: dict[str, _NameClaim] = {}
        ordered = [
            (is_adapter, base, name) for base, claims in self._claims.items() for is_adapter, name in claims
        ]
        for is_adapter, base, name in sorted(ordered):
            claim = self._claims[base][is_adapter, name]
            if name in self._models:
                self._complain(f"{name} is not served as {claim}: a model has that name")
            elif name in served:
                self._complain(f"{name} is not served as {claim}: it is {served[name]}")
            else:
                served[name] = claim
        return served

    def _serve(self, name: str, claim: _NameClaim | None) -> None:
        """Answer to a name from now on; None is no longer."""
        known = self._others.get(name)
        if claim is None:
            logger.info("%s is not served any more: it was %s", name, known)
            del self._others[name]
        else:
            if known is None or known[:2] != claim[:2]:
                logger.info("serving %s, which is %s", name, claim)
            self._others[name] = claim
        if known is not None and known.adapter is not None and (claim is None or claim[:2] != known[:2]):
            self._models[known.model].forget_adapter(known.adapter)

    def is_served(self, name: str) -> bool:
        return name in self._models or name in self._others

    def get(self, name: str) -> ServedModel:
        """Return the model or adapter of that name. Raises UnknownModel; NoReplicaAvailable while no model at
        all is known, so that a router that has just started sends no client away for good."""
        model = self._models.get(name)
        if model is not None:
            return model
        other = self._others.get(name)
        if other is None:
            with about_model(name):
                self.check_known()
                raise unknown_model(name, self.all_names())
        model = self._models[other.model]
        return model if other.adapter is None else model.with_adapter(other.adapter)

    def check_known(self) -> None:
        """Raises NoReplicaAvailable while no model at all is known."""
        if not self._models:
            raise NoReplicaAvailable("No replica is known yet. Try again shortly.")

    def bundle_of(self, model_name: str) -> tuple[bytes, TokenizerBundle]:
        """Return a model's (not an adapter's) tokenizer files and their digest."""
        side = self._text_sides[model_name]
        return side.digest, side.bundle

    def names(self) -> Sequence[str]:
        """Return the models' names."""
        return sorted(self._models)

    def instruments(self) -> Iterator[Instrument]:
        """Instruments of the caches of encoded text and of block hashes."""

        def each(read: Callable[[SegmentCache], float]) -> Callable[[], Mapping[str, float]]:
            return lambda: {name: read(self.get(name).tokenizer.cache) for name in self.names()}

        yield gauge(
            "router_token_cache_bytes",
            "Memory of the cache of encoded text",
            each(lambda cache: cache.num_bytes),
            "model",
        )
        yield counter(
            "router_token_cache_hits_total",
            "Text segments found in the cache of encoded text",
            each(lambda cache: cache.num_hits),
            "model",
        )
        yield counter(
            "router_token_cache_misses_total",
            "Text segments that had to be encoded",
            each(lambda cache: cache.num_misses),
            "model",
        )
        yield from self.chains.instruments()

    def all_names(self) -> Sequence[str]:
        """Return all that can be asked for: models first, since some clients take the first; their other
        names, and adapters."""
        others = self._others.keys() - self._models.keys()
        others_in_order = sorted(others, key=lambda name: (self._others[name].adapter is not None, name))
        return [*self.names(), *others_in_order]

    def routes(self) -> Mapping[str, Sequence[str]]:
        """Return the models' names by the routes that are passed on to their servers."""
        found: dict[str, list[str]] = {}
        for name in self.names():
            for route in self._models[name].card.routes:
                found.setdefault(route, []).append(name)
        return found

    def within(self, namespace: str | None) -> TextModels:
        """Return the models for texts of this namespace."""
        return _Within(self, namespace)

    def user_tag(self, user: str | None, owner: str | None = None) -> UserTag:
        """Return a tag by which replicas distinguish users without learning who they are; alike for all
        routers of a cluster. Equal names of users of two owners are two users."""
        if not user:
            return NO_USER
        name = user.encode("utf-8", "surrogatepass")
        if owner is not None:
            name = len(name).to_bytes(4, "little") + name + owner.encode()
        digest = hashlib.blake2b(name, key=self._secret, digest_size=USER_TAG_BYTES, person=b"kvasir-user-v1")
        return UserTag(digest.digest())

    def tenant_tag(self, owner: str | None) -> bytes:
        """Return a tag by which replicas distinguish tenants; empty without keys."""
        if owner is None:
            return b""
        digest = hashlib.blake2b(
            owner.encode(), key=self._secret, digest_size=USER_TAG_BYTES, person=b"kvasir-owner-v1"
        )
        return digest.digest()

    def _complain(self, complaint: str) -> None:
        """Log once, and a bounded number: replicas repeat the cause with every heartbeat."""
        if complaint not in self._complaints and len(self._complaints) < MOST_COMPLAINTS:
            self._complaints.add(complaint)
            logger.warning("%s", complaint)


class _Within:
    """The catalog's models for one namespace's texts."""

    def __init__(self, catalog: ModelCatalog, namespace: str | None) -> None:
        self._catalog = catalog
        self._namespace = namespace

    def get(self, name: str) -> TextModel:
        return self._catalog.get(name).within(self._namespace)

    def names(self) -> Sequence[str]:
        return self._catalog.names()


def bundle_digest(bundle: TokenizerBundle) -> bytes:
    digest = hashlib.sha256()
    for name in sorted(bundle.files):
        for part in (name.encode(), bundle.files[name]):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.digest()
