"""KubernetesFinder: the ready pods of a Service or an InferencePool, as Kubernetes' API server says.

Owns the questions and what answers mean. What is there always comes from a list; a watch only says that the
list may have changed, so nothing in its stream needs to be understood.
"""

import asyncio
import contextlib
import ssl
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec

from cluster.config import EngineSource
from cluster.engines.addresses import SourceFailed, urls_of
from replicas.remote_engine.server import check_plain, read_whole

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Folder with a pod's token, the API server's CA and the pod's namespace."""
API_SERVER = "kubernetes.default.svc:443"

ANSWER_SECONDS = 10.0
PAUSE_SECONDS = 1.0
"""Shortest time between two lists."""
WATCH_SECONDS = 30
"""Longest time between two lists."""
MOST_BYTES = 2**26

POOLS = "/apis/inference.networking.k8s.io/v1"
SLICES = "/apis/discovery.k8s.io/v1"


class _ObjectMeta(msgspec.Struct, rename="camel"):
    resource_version: str = ""
    deletion_timestamp: str | None = None


class _Conditions(msgspec.Struct, frozen=True):
    ready: bool | None = None
    terminating: bool | None = None


class _SliceEndpoint(msgspec.Struct):
    addresses: list[str] = []
    conditions: _Conditions = _Conditions()


class _Port(msgspec.Struct):
    name: str | None = None
    port: int | None = None


class _Slice(msgspec.Struct):
    endpoints: list[_SliceEndpoint] | None = None
    ports: list[_Port] | None = None


class _Slices(msgspec.Struct):
    metadata: _ObjectMeta
    items: list[_Slice] | None


class _Condition(msgspec.Struct):
    type: str
    status: str


class _PodStatus(msgspec.Struct, frozen=True):
    pod_ip: str | None = msgspec.field(name="podIP", default=None)
    conditions: list[_Condition] = []


class _Pod(msgspec.Struct):
    metadata: _ObjectMeta
    status: _PodStatus = _PodStatus()


class _Pods(msgspec.Struct):
    metadata: _ObjectMeta
    items: list[_Pod] | None


class _Selector(msgspec.Struct, rename="camel"):
    match_labels: dict[str, str]


class _TargetPort(msgspec.Struct):
    number: int


class _InferencePoolSpec(msgspec.Struct, rename="camel"):
    selector: _Selector
    target_ports: list[_TargetPort]


class _InferencePool(msgspec.Struct):
    spec: _InferencePoolSpec


Answer = TypeVar("Answer")


class KubernetesFinder:
    linger_seconds = 0.0

    def __init__(self, source: EngineSource, api_server: str = API_SERVER, account: Path = ACCOUNT) -> None:
        self._source = source
        self._api_server = api_server
        self._account = account
        self._client: httpx.AsyncClient | None = None
        self._listed: tuple[str, dict[str, str]] | None = None
        """The last list: its path, and its query with its version."""

    async def look(self) -> set[str]:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await (self._of_service() if self._source.service else self._of_pool())
        except (httpx.HTTPError, OSError, ValueError, msgspec.MsgspecError, SourceFailed) as error:
            await self.close()
            if isinstance(error, SourceFailed):
                raise
            raise SourceFailed(f"Kubernetes' API server cannot be asked: {error!r}") from error

    async def changed(self) -> None:
        await asyncio.sleep(PAUSE_SECONDS)
        if self._listed is None or self._client is None:
            return
        path, query = self._listed
        query = {**query, "watch": "1", "timeoutSeconds": str(WATCH_SECONDS)}
        with contextlib.suppress(httpx.HTTPError, OSError):
            headers = await self._headers()
            async with (
                asyncio.timeout(WATCH_SECONDS + ANSWER_SECONDS),
                self._client.stream("GET", path, params=query, headers=headers, timeout=None) as answer,
            ):
                async for piece in answer.aiter_raw():
                    if piece.strip():
                        return

    async def close(self) -> None:
        client, self._client, self._listed = self._client, None, None
        if client is not None:
            await client.aclose()

    async def _of_service(self) -> set[str]:
        source = self._source
        path = f"{SLICES}/namespaces/{await self._namespace()}/endpointslices"
        slices = await self._list(path, f"kubernetes.io/service-name={source.service}", _Slices)
        return urls_of(
            (address, _port_of(each, source))
            for each in slices.items or ()
            for endpoint in each.endpoints or ()
            # Of a Service that publishes addresses that are not ready, each counts as ready to its end.
            if endpoint.conditions.ready is not False and not endpoint.conditions.terminating
            for address in endpoint.addresses[:1]
        )

    async def _of_pool(self) -> set[str]:
        namespace = await self._namespace()
        path = f"{POOLS}/namespaces/{namespace}/inferencepools/{self._source.inference_pool}"
        pool = (await self._get(path, {}, _InferencePool)).spec
        labels = ",".join(f"{name}={value}" for name, value in sorted(pool.selector.match_labels.items()))
        if not labels:
            raise SourceFailed(f"InferencePool {self._source.inference_pool} selects no pods")
        pods = await self._list(f"/api/v1/namespaces/{namespace}/pods", labels, _Pods)
        return urls_of(
            (pod.status.pod_ip, port.number)
            for pod in pods.items or ()
            if pod.status.pod_ip and pod.metadata.deletion_timestamp is None
            if any(one.type == "Ready" and one.status == "True" for one in pod.status.conditions)
            for port in pool.target_ports
        )

    async def _list(self, path: str, labels: str, kind: type[Answer]) -> Answer:
        query = {"labelSelector": labels}
        found: Any = await self._get(path, query, kind)
        self._listed = (path, {**query, "resourceVersion": found.metadata.resource_version})
        listed: Answer = found
        return listed

    async def _get(self, path: str, query: dict[str, str], kind: type[Answer]) -> Answer:
        if self._client is None:
            self._client = await asyncio.to_thread(self._connect)
        headers = await self._headers()
        async with self._client.stream("GET", path, params=query, headers=headers) as answer:
            check_plain(answer.headers)
            content = await read_whole(answer.aiter_raw(), MOST_BYTES)
        if answer.status_code != 200:
            raise SourceFailed(f"Kubernetes answers {answer.status_code} to {path}: {_said(content)}")
        return msgspec.json.decode(content, type=kind)

    def _connect(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=f"https://{self._api_server}",
            headers={"accept-encoding": "identity"},
            verify=ssl.create_default_context(cafile=self._account / "ca.crt"),
            timeout=ANSWER_SECONDS,
            follow_redirects=False,
            trust_env=False,
        )

    async def _headers(self) -> dict[str, str]:
        """Read the token anew each time: Kubernetes replaces it."""
        return {"authorization": f"Bearer {await self._read('token')}"}

    async def _namespace(self) -> str:
        return self._source.namespace or await self._read("namespace")

    async def _read(self, name: str) -> str:
        return (await asyncio.to_thread((self._account / name).read_text)).strip()


def _port_of(endpoints: _Slice, source: EngineSource) -> int:
    ports = [
        each.port
        for each in endpoints.ports or ()
        if each.port is not None and source.port in (None, each.name, str(each.port))
    ]
    if len(ports) != 1:
        which = "one port" if source.port is None else f"a port {source.port}"
        raise SourceFailed(f"Service {source.service} has not {which}: give the name or number of one")
    return ports[0]


def _said(content: bytes) -> str:
    try:
        return str(msgspec.json.decode(content)["message"])[:500]
    except (msgspec.MsgspecError, LookupError, TypeError):
        return repr(content[:200])
