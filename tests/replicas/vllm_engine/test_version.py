"""Which names of vLLM are read, and what a version that lacks one is told."""

import ast
import inspect
import logging
import re
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from replicas.config import ReplicaConfig
from replicas.engines import build_engine_here
from replicas.errors import StartupError
from replicas.kvcache.hash_map import root_in
from replicas.process.settings import SettingsError
from replicas.protocol.blocks import HASH_BYTES, BlockHash, PublishedBeginning
from replicas.protocol.frames import SamplingParams, Submit
from replicas.vllm_engine.reads import RANK_READS, READS, TIER_READS
from replicas.vllm_engine.salts import salt_of
from replicas.vllm_engine.version import NEWEST, OLDEST, check_version, missing_names

REPLICAS = Path(__file__).parents[3] / "replicas"
FOLDER = REPLICAS / "vllm_engine"
ALL = [
    (module, name, text)
    for reads in (READS, TIER_READS, RANK_READS)
    for module, of in reads.items()
    for name, text in of.items()
]
NAMES = {each for _, name, text in ALL for each in [*name.split("."), *text.split()]}


def trees(folder: Path) -> Iterator[ast.Module]:
    for path in sorted(folder.rglob("*.py")):
        if path.name not in ("reads.py", "version.py"):
            yield ast.parse(path.read_text("utf-8"))


def imports() -> Iterator[tuple[str, str]]:
    """The modules of vLLM that the folder imports, each with a name from it; '' for the module itself."""
    for tree in trees(FOLDER):
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                for each in node.names:
                    yield node.module or "", each.name
            elif isinstance(node, ast.Import):
                yield from ((each.name, "") for each in node.names if each.name.split(".")[0] == "vllm")


def test_what_is_imported_of_vllm_is_listed() -> None:
    listed = {(module, name.split(".")[0]) for module, name, _ in ALL}
    modules = {module for module, _ in listed}
    unlisted = [
        (module, name)
        for module, name in imports()
        if (module, name) not in listed and (module if not name else f"{module}.{name}") not in modules
    ]
    assert not unlisted


def our_names() -> set[str]:
    names: set[str] = set()
    for tree in trees(REPLICAS):
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                if isinstance(node, ast.Name):
                    names.add(node.id)
                elif isinstance(node.value, ast.Name) and node.value.id == "self":
                    names.add(node.attr)
    return names


def root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def foreign_attributes() -> Iterator[str]:
    """Attributes that the folder reads of what it imports from neither us nor other libraries."""
    types: list[Any] = [
        str,
        bytes,
        list,
        dict,
        set,
        Counter,
        Path,
        re.Pattern,
        torch.Tensor,
        torch.Generator,
        int,
    ]
    known = our_names().union(
        *map(dir, [*types, np.ndarray, Image.Image, type(re.match("", ""))]),
        dir(logging.Logger),
        ["hexdigest", "__name__"],
    )
    for tree in trees(FOLDER):
        others = {
            (each.asname or each.name).split(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for each in node.names
            if "vllm" not in (getattr(node, "module", None) or each.name)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr not in known and root(node) not in others:
                yield node.attr


def test_what_is_read_of_vllms_objects_is_listed() -> None:
    assert sorted(set(foreign_attributes()) - NAMES - {"envs"}) == []


def test_nothing_is_listed_that_is_not_used() -> None:
    used: set[str] = set()
    for tree in trees(FOLDER):
        for node in ast.walk(tree):
            match node:
                case ast.Attribute(attr=name) | ast.FunctionDef(name=name) | ast.keyword(arg=str(name)):
                    used.add(name)
                case ast.Constant(value=str(name)) | ast.alias(name=name):
                    used.add(name)
    attributes = {each for _, _, text in ALL for each in text.split()}
    assert sorted(attributes - used) == []


# A vLLM of the list's own making.


def lay(monkeypatch: pytest.MonkeyPatch, version: str, *, without: str = "") -> None:
    """Put a vLLM in the place of the installed one that has all that is listed, but for one name."""
    modules: dict[str, Any] = {}
    for name, dotted, text in ALL:
        if name not in modules:
            modules[name] = ModuleType(name)
            modules[name].__spec__ = ModuleSpec(name, None)
        if f"{name}.{dotted}" != without:
            _fill(modules[name], dotted, [each for each in text.split() if f"{dotted}.{each}" != without])
    modules["vllm"].__version__ = version
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, None if name == without else module)


def _fill(module: ModuleType, dotted: str, names: list[str]) -> None:
    """One half of a class's attributes is declared, the other set by its constructor."""
    name, _, method = dotted.partition(".")
    made: Any = vars(module).setdefault(name, type(name, (), {"__annotations__": {}}))
    scope: dict[str, Any] = {}
    if method:
        exec(f"def made(self, {', '.join(names)}): ...", scope)
        setattr(made, method, scope["made"])
    elif name == "mm_input":
        exec(f"def made({', '.join(names)}): ...", scope)
        setattr(module, name, scope["made"])
    else:
        made.__annotations__.update(dict.fromkeys(names[::2]))
        if names[1::2]:
            exec(f"def made(self): self.{' = self.'.join(names[1::2])} = None", scope)
            made.__init__ = scope["made"]


@pytest.mark.parametrize(
    "name",
    [
        "vllm.v1.request",
        "vllm.v1.request.Request",
        "BlockStored.block_hashes",
        "BlockStored.parent_block_hash",
        "LLMEngine.add_request.session_id",
        "mm_input.cache_salt",
    ],
)
def test_every_kind_of_name_is_looked_for(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    lay(monkeypatch, OLDEST)
    assert list(missing_names(READS)) == list(missing_names(TIER_READS)) == []
    lay(monkeypatch, OLDEST, without=name)
    assert list(missing_names(READS)) == [name]


def test_an_old_vllm_is_refused_by_the_name_that_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    lay(monkeypatch, "0.29.0", without="BlockStored.session_id")
    with pytest.raises(StartupError, match=r"^vLLM 0\.29\.0 lacks BlockStored\.session_id: Kvasir needs"):
        build_engine_here(ReplicaConfig(engine="vllm"))


def test_a_much_older_one_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in READS:
        monkeypatch.setitem(sys.modules, module, None)  # type: ignore[arg-type]
    bare = ModuleType("vllm")
    bare.__version__ = "0.8.5"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", bare)
    with pytest.raises(
        StartupError, match=r"^vLLM 0\.8\.5 lacks vllm\.EngineArgs, .* and \d+ more: "
    ) as refused:
        check_version(has_tiers=False)
    assert len(str(refused.value)) < 250


def test_what_only_tiers_need_is_asked_for_with_tiers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    lay(monkeypatch, "0.31.0", without="vllm.v1.metrics.cache_hit_source")
    check_version(has_tiers=False)
    with pytest.raises(StartupError, match=r"lacks vllm\.v1\.metrics\.cache_hit_source: host_kv_bytes needs"):
        check_version(has_tiers=True)


@pytest.mark.parametrize(
    ("version", "warns"),
    [("0.99.0", True), ("1.0", True), ("dev", True), (f"{NEWEST}.1rc2", False), (f"{OLDEST}.0", False)],
)
def test_a_version_that_is_not_known_starts_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str, warns: bool
) -> None:
    lay(monkeypatch, version)
    with caplog.at_level(logging.WARNING):
        check_version(has_tiers=True)
    assert (f"vLLM {version} has all that it reads" in caplog.text) == warns


# The installed one.


@pytest.mark.vllm
def test_the_installed_vllm_has_all(environment: None) -> None:
    assert list(missing_names(READS)) == list(missing_names(TIER_READS)) == []
    check_version(has_tiers=True)


@pytest.mark.vllm
def test_what_vllm_calls_takes_what_vllm_passes(environment: None) -> None:
    from replicas.vllm_engine import grammars, offloading, row_copier

    classes = [each for room in (grammars, offloading, row_copier) for each in vars(room).values()]
    ours = {each for each in classes if inspect.isclass(each) and each.__module__.startswith("replicas.vllm")}
    theirs = [(each, base) for each in ours for base in each.__bases__ if base.__module__.startswith("vllm")]
    assert len(theirs) >= 5
    for each, base in theirs:
        assert not inspect.isabstract(each)
        for name, method in vars(each).items():
            if inspect.isfunction(method) and name != "__init__" and hasattr(base, name):
                parameters = inspect.signature(method).parameters.values()
                if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters):
                    taken = {parameter.name for parameter in parameters}
                    assert taken >= set(inspect.signature(getattr(base, name)).parameters), (each, name)


@pytest.mark.vllm
@pytest.mark.parametrize("has_tags", [True, False])
def test_the_root_behind_a_published_beginning_comes_with_the_event(
    environment: None, monkeypatch: pytest.MonkeyPatch, has_tags: bool
) -> None:
    from vllm.v1.core import kv_cache_utils

    from replicas.vllm_engine.core_view import hash_second_roots

    if not has_tags:
        monkeypatch.delattr(kv_cache_utils, "to_event_extra_keys", raising=False)
    elif not hasattr(kv_cache_utils, "to_event_extra_keys"):
        pytest.skip("this version has no tags")
    monkeypatch.setattr(kv_cache_utils, "_gen_prompt_embeds_extra_hash_keys", lambda *_: [])
    hash_second_roots()
    root, published = (BlockHash(bytes([number]) * HASH_BYTES) for number in (1, 2))
    salt = salt_of(
        Submit(1, b"", SamplingParams(max_tokens=1), root, published=PublishedBeginning(published, 2))
    )
    request = SimpleNamespace(cache_salt=salt)
    for start, expected in ((32, None), (64, root), (96, None)):
        keys = kv_cache_utils._gen_prompt_embeds_extra_hash_keys(request, start, start + 32)
        if has_tags and keys:
            (keys,) = kv_cache_utils.to_event_extra_keys([tuple(keys)])
        assert root_in(keys) == expected


@pytest.mark.vllm
def test_hashes_of_draft_models_cover_their_blocks_only(
    environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from replicas.vllm_engine import arguments

    class WithLookahead:
        disable_lookahead_block_hashes = False

    drafts = {"method": "eagle", "num-speculative-tokens": 2}
    monkeypatch.setattr(arguments, "SpeculativeConfig", WithLookahead)
    for given in ({"speculative_config": drafts}, {"spec_method": "mtp"}):
        made = arguments._draft_arguments(given)["speculative_config"]
        assert made["disable_lookahead_block_hashes"] is True
    with pytest.raises(SettingsError, match="cannot turn disable_lookahead_block_hashes off"):
        arguments._draft_arguments(
            {"speculative_config": {**drafts, "disable-lookahead-block-hashes": False}}
        )
    assert arguments._draft_arguments({}) == {}
    monkeypatch.setattr(arguments, "SpeculativeConfig", object)
    assert arguments._draft_arguments({"speculative_config": drafts}) == {}
