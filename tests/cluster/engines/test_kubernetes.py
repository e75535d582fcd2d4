import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.config import EngineSource
from cluster.engines import kubernetes
from cluster.engines.addresses import SourceFailed
from cluster.engines.kubernetes import KubernetesFinder
from tests.cluster.engines.kubernetes_api import PODS, POOL, SLICES, KubernetesApi, kubernetes_api

HTTP = {"name": "http", "port": 8000}
SERVICE = EngineSource(service="vllm")


@pytest.fixture
async def at(tmp_path: Path) -> AsyncIterator[tuple[KubernetesApi, str, Path]]:
    async with kubernetes_api(tmp_path / "account") as found:
        yield found


@pytest.fixture
def api(at: tuple[KubernetesApi, str, Path], monkeypatch: pytest.MonkeyPatch) -> KubernetesApi:
    monkeypatch.setattr(kubernetes, "PAUSE_SECONDS", 0.0)
    return at[0]


@pytest.fixture
async def finder(
    at: tuple[KubernetesApi, str, Path],
) -> AsyncIterator[Callable[..., KubernetesFinder]]:
    made: list[KubernetesFinder] = []

    def make(source: EngineSource = SERVICE) -> KubernetesFinder:
        made.append(KubernetesFinder(source, *at[1:]))
        return made[-1]

    yield make
    for each in made:
        await each.close()


Make = Callable[..., KubernetesFinder]


def endpoint(address: str, **conditions: bool | None) -> dict[str, Any]:
    return {"addresses": [address], "conditions": conditions}


def slice_of(*endpoints: dict[str, Any], ports: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    return {"addressType": "IPv4", "endpoints": list(endpoints), "ports": [HTTP] if ports is None else ports}


def pod(address: str | None, ready: str = "True", **metadata: str) -> dict[str, Any]:
    conditions = [{"type": "Initialized", "status": "True"}, {"type": "Ready", "status": ready}]
    return {"metadata": metadata, "status": {"podIP": address, "conditions": conditions}}


async def test_ready_endpoints_of_all_slices_are_servers(api: KubernetesApi, finder: Make) -> None:
    api.objects[SLICES] = api.list_of(
        slice_of(endpoint("10.0.0.1", ready=True), endpoint("10.0.0.2", ready=False)),
        slice_of(endpoint("10.0.0.3"), endpoint("10.0.0.4", ready=None)),
        slice_of(endpoint("10.0.0.5", ready=True, serving=True, terminating=True)),
        {"addressType": "IPv6", "endpoints": [endpoint("fd00::1", ready=True)], "ports": [HTTP]},
        {"addressType": "IPv4", "endpoints": None, "ports": None},
    )
    assert await finder().look() == {f"http://10.0.0.{number}:8000" for number in (1, 3, 4)}
    assert api.asked == [(SLICES, {"labelSelector": "kubernetes.io/service-name=vllm"})]
    api.objects[SLICES] = api.list_of()
    assert await finder().look() == set()


async def test_one_of_several_ports_is_chosen_by_name_or_number(api: KubernetesApi, finder: Make) -> None:
    ports = [HTTP, {"name": "events", "port": 5557}]
    api.objects[SLICES] = api.list_of(slice_of(endpoint("10.0.0.1"), ports=ports))
    for port in ("http", "8000"):
        assert await finder(EngineSource(service="vllm", port=port)).look() == {"http://10.0.0.1:8000"}
    for port in (None, "grpc"):
        with pytest.raises(SourceFailed, match="give the name or number of one"):
            await finder(EngineSource(service="vllm", port=port)).look()


async def test_ready_pods_of_an_inference_pool_are_servers_for_each_port(
    api: KubernetesApi, finder: Make
) -> None:
    selector = {"matchLabels": {"app": "vllm", "model": "qwen"}}
    api.objects[POOL] = {"spec": {"selector": selector, "targetPorts": [{"number": 8000}, {"number": 8001}]}}
    api.objects[PODS] = api.list_of(
        pod("10.0.0.1"), pod("10.0.0.2", "False"), pod(None), pod("10.0.0.3", deletionTimestamp="2026")
    )
    source = EngineSource(inference_pool="qwen", namespace="llm")
    assert await finder(source).look() == {"http://10.0.0.1:8000", "http://10.0.0.1:8001"}
    assert api.asked[1] == (PODS, {"labelSelector": "app=vllm,model=qwen"})


async def test_a_pool_that_is_gone_is_a_source_that_fails(api: KubernetesApi, finder: Make) -> None:
    with pytest.raises(SourceFailed, match=r"answers 404 to .*inferencepools/qwen: not found"):
        await finder(EngineSource(inference_pool="qwen")).look()


async def test_a_pool_that_selects_nothing_has_not_every_pod(api: KubernetesApi, finder: Make) -> None:
    api.objects[POOL] = {"spec": {"selector": {"matchLabels": {}}, "targetPorts": [{"number": 8000}]}}
    with pytest.raises(SourceFailed, match="selects no pods"):
        await finder(EngineSource(inference_pool="qwen")).look()


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        *(("closes", "cannot be asked"), ("hangs", "cannot be asked"), ("drips", "cannot be asked")),
        *(("forbids", "answers 403 .*endpointslices is forbidden"), ("fails", "answers 500")),
        *(("nonsense", "cannot be asked"), ("endless", "more than 1000 bytes")),
        ("compresses", "it is compressed: gzip"),
    ],
)
async def test_what_goes_wrong_is_said_and_over_with_the_next_look(
    api: KubernetesApi, finder: Make, fault: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "ANSWER_SECONDS", 0.3)
    monkeypatch.setattr(kubernetes, "MOST_BYTES", 1000)
    api.objects[SLICES] = api.list_of(slice_of(endpoint("10.0.0.1")))
    one = finder()
    api.fault = fault
    for _ in range(2):
        with pytest.raises(SourceFailed, match=sentence):
            await one.look()
        await asyncio.wait_for(one.changed(), 5)
    monkeypatch.setattr(kubernetes, "ANSWER_SECONDS", 10)
    api.fault = ""
    assert await one.look() == {"http://10.0.0.1:8000"}


async def test_a_token_that_was_replaced_is_read_anew(
    api: KubernetesApi, finder: Make, at: tuple[KubernetesApi, str, Path]
) -> None:
    api.objects[SLICES] = api.list_of(slice_of(endpoint("10.0.0.1")))
    one = finder()
    await one.look()
    api.token = "second"
    with pytest.raises(SourceFailed, match="answers 401"):
        await one.look()
    (at[2] / "token").write_text("second")
    assert await one.look() == {"http://10.0.0.1:8000"}


async def test_outside_of_kubernetes_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(SourceFailed, match="No such file"):
        await KubernetesFinder(SERVICE, account=tmp_path).look()


async def ends(wait: Awaitable[None]) -> None:
    await asyncio.wait_for(wait, 20)


@pytest.mark.parametrize(
    "events",
    [
        [{"type": "MODIFIED", "object": {"kind": "EndpointSlice"}}],
        [{"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "9"}}}],
        [{"type": "ERROR", "object": {"code": 410, "reason": "Expired"}}],
        ["nonsense"],
    ],
)
async def test_whatever_a_watch_says_another_list_follows(
    api: KubernetesApi, finder: Make, events: list[Any]
) -> None:
    api.objects[SLICES] = api.list_of(slice_of(endpoint("10.0.0.1")))
    one = finder()
    await one.look()
    waiting = asyncio.create_task(one.changed())
    await asyncio.sleep(0.1)
    assert not waiting.done(), "nothing has changed"
    await api.say(*events)
    await ends(waiting)
    path, query = api.asked[-1]
    assert (path, query["resourceVersion"], query["watch"]) == (SLICES, "7", "1")
    api.objects[SLICES] = api.list_of(slice_of(endpoint("10.0.0.2")))
    assert await one.look() == {"http://10.0.0.2:8000"}


async def test_empty_lines_of_a_watch_are_no_change(api: KubernetesApi, finder: Make) -> None:
    api.objects[SLICES] = api.list_of()
    one = finder()
    await one.look()
    waiting = asyncio.create_task(one.changed())
    await api.say("\n\n\n")
    await asyncio.sleep(0.1)
    assert not waiting.done()
    waiting.cancel()


@pytest.mark.parametrize("fault", ["gone", "closes", "fails"])
async def test_a_watch_that_cannot_be_is_followed_by_a_list(
    api: KubernetesApi, finder: Make, fault: str
) -> None:
    api.objects[SLICES] = api.list_of()
    one = finder()
    await one.look()
    api.fault = fault
    await ends(one.changed())


async def test_a_watch_that_says_nothing_ends(
    api: KubernetesApi, finder: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "WATCH_SECONDS", 0)
    monkeypatch.setattr(kubernetes, "ANSWER_SECONDS", 0.3)
    api.objects[SLICES] = api.list_of()
    one = finder()
    monkeypatch.setattr(kubernetes, "ANSWER_SECONDS", 10)
    await one.look()
    monkeypatch.setattr(kubernetes, "ANSWER_SECONDS", 0.3)
    await ends(one.changed())


async def test_lists_are_never_asked_for_without_a_pause(
    api: KubernetesApi, finder: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "PAUSE_SECONDS", 0.1)
    api.objects[SLICES] = api.list_of()
    api.fault = "gone"
    one, end = finder(), asyncio.get_running_loop().time() + 0.55
    while asyncio.get_running_loop().time() < end:
        await one.look()
        await one.changed()
    assert api.num_lists <= 6
