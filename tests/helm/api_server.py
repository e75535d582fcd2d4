"""A Kubernetes API server that stores what it is sent and runs nothing of it: enough for Helm.

Owns the objects. Knows no schema and no other rule of Kubernetes'
than names, namespaces and that Secrets come in protobuf: `kubernetes_validate` looks at the objects.
"""

import base64
import contextlib
import json
import os
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import helm_python
import yaml

Object = dict[str, Any]
Key = tuple[str, str]
"""Kind and name: all tests have one namespace."""

KINDS: dict[str, dict[str, str]] = {
    "v1": {
        "ConfigMap": "configmaps",
        "Pod": "pods",
        "Secret": "secrets",
        "Service": "services",
        "ServiceAccount": "serviceaccounts",
    },
    "apps/v1": {"Deployment": "deployments", "StatefulSet": "statefulsets"},
    "ray.io/v1": {"RayCluster": "rayclusters"},
    "keda.sh/v1alpha1": {"ScaledObject": "scaledobjects"},
    "cert-manager.io/v1": {"Issuer": "issuers", "Certificate": "certificates"},
    "gateway.networking.k8s.io/v1": {"HTTPRoute": "httproutes"},
    "inference.networking.k8s.io/v1": {"InferencePool": "inferencepools"},
    "autoscaling/v2": {"HorizontalPodAutoscaler": "horizontalpodautoscalers"},
    "networking.k8s.io/v1": {"Ingress": "ingresses", "NetworkPolicy": "networkpolicies"},
    "rbac.authorization.k8s.io/v1": {"Role": "roles", "RoleBinding": "rolebindings"},
    "policy/v1": {"PodDisruptionBudget": "poddisruptionbudgets"},
    "monitoring.coreos.com/v1": {
        "PodMonitor": "podmonitors",
        "PrometheusRule": "prometheusrules",
    },
}


class ApiServer:
    """Hold objects by kind and name."""

    def __init__(self) -> None:
        self.objects: dict[Key, Object] = {}
        self.url = ""

    def installed(self) -> dict[Key, Object]:
        """What charts have made: without Helm's own records."""
        return {key: item for key, item in self.objects.items() if not key[1].startswith("sh.helm.release")}

    def answer(self, verb: str, path: str, query: dict[str, list[str]], body: bytes) -> tuple[int, Object]:
        parts = path.strip("/").split("/")
        if path == "/version":
            return 200, {"major": "1", "minor": "36", "gitVersion": "v1.36.0"}
        if path == "/openapi/v3":
            return 200, {
                "paths": {
                    _group_path(v): {"serverRelativeURL": f"/openapi/v3/{_group_path(v)}"} for v in KINDS
                }
            }
        if path.startswith("/openapi/v3/"):
            return 200, _openapi(path.removeprefix("/openapi/v3/"))
        if path == "/api":
            return 200, {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            return 200, {"kind": "APIGroupList", "groups": [_group(v) for v in KINDS if "/" in v]}
        version, rest = ("v1", parts[2:]) if parts[0] == "api" else ("/".join(parts[1:3]), parts[3:])
        if version not in KINDS or parts[0] not in ("api", "apis"):
            return 404, _status(404, "NotFound", f"no {path} here")
        if not rest:
            return 200, _resources(version)
        if rest[0] == "namespaces" and len(rest) > 2:
            rest = rest[2:]
        kind = next(kind for kind, plural in KINDS[version].items() if plural == rest[0])
        return self._object(verb, version, kind, rest[1] if len(rest) > 1 else None, query, body)

    def _object(
        self, verb: str, version: str, kind: str, name: str | None, query: dict[str, list[str]], body: bytes
    ) -> tuple[int, Object]:
        if verb == "GET" and name is None:
            return 200, {
                "kind": f"{kind}List",
                "apiVersion": version,
                "metadata": {},
                "items": self._selected(kind, query),
            }
        if verb == "GET" or verb == "DELETE":
            assert name is not None
            item = self.objects.get((kind, name))
            if item is None:
                return 404, _status(404, "NotFound", f'{kind} "{name}" not found')
            if verb == "DELETE":
                del self.objects[kind, name]
            return 200, item
        item = _decoded(body)
        item.setdefault("kind", kind)
        item.setdefault("apiVersion", version)
        name = item["metadata"]["name"]
        assert isinstance(name, str)
        if verb == "POST" and (kind, name) in self.objects:
            return 409, _status(409, "AlreadyExists", f'{kind} "{name}" already exists')
        created = (kind, name) not in self.objects
        if kind == "Secret":
            plain = item.pop("stringData", {})
            item["data"] = item.get("data", {}) | {
                key: base64.b64encode(text.encode()).decode() for key, text in plain.items()
            }
        self.objects[kind, name] = item
        return (201 if created else 200), item

    def _selected(self, kind: str, query: dict[str, list[str]]) -> list[Object]:
        wanted = [
            pair.split("=", 1) for pair in query.get("labelSelector", [""])[0].split(",") if "=" in pair
        ]
        return [
            item
            for (other, _), item in self.objects.items()
            if other == kind
            and all(item["metadata"].get("labels", {}).get(name) == value for name, value in wanted)
        ]


@contextlib.contextmanager
def api_server() -> Iterator[ApiServer]:
    server = ApiServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            url = urlsplit(self.path)
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, content = server.answer(self.command, url.path, parse_qs(url.query), body)
            payload = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve

        def log_message(self, format: str, *arguments: Any) -> None:
            """Nothing: stderr is the test's."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        server.url = f"http://127.0.0.1:{http.server_port}"
        try:
            yield server
        finally:
            http.shutdown()
            thread.join()


@contextlib.contextmanager
def helm_at(server: ApiServer, namespace: str) -> Iterator[helm_python.Config]:
    """Helm, which leaves nothing on the disk."""
    kubeconfig = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "here", "cluster": {"server": server.url}}],
        "users": [{"name": "me", "user": {"token": "mine"}}],
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me", "namespace": namespace}}],
        "current-context": "here",
    }
    home = os.environ.get("HOME")
    with tempfile.TemporaryDirectory(prefix="kvasir-helm-") as folder:
        path = Path(folder) / "kubeconfig"
        path.write_text(json.dumps(kubeconfig), encoding="utf-8")
        os.environ["HOME"] = folder
        try:
            with helm_python.Config(
                kubeconfig_path=path, namespace=namespace, qps=1000.0, burst_limit=1000
            ) as helm:
                yield helm
        finally:
            os.environ.pop("HOME")
            if home is not None:
                os.environ["HOME"] = home


def _group_path(version: str) -> str:
    return f"api/{version}" if version == "v1" else f"apis/{version}"


def _group(version: str) -> Object:
    group, _, number = version.partition("/")
    entry = {"groupVersion": version, "version": number}
    return {"name": group, "versions": [entry], "preferredVersion": entry}


def _resources(version: str) -> Object:
    verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
    resources = [
        {
            "name": plural,
            "singularName": kind.lower(),
            "namespaced": kind != "Namespace",
            "kind": kind,
            "verbs": verbs,
        }
        for kind, plural in KINDS[version].items()
    ]
    return {"kind": "APIResourceList", "groupVersion": version, "resources": resources}


def _openapi(group_path: str) -> Object:
    """Helm only asks whether PATCH takes fieldValidation, by kind."""
    version = group_path.split("/", 1)[1]
    group, _, number = version.rpartition("/")
    parameter = {"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}
    return {
        "openapi": "3.0.0",
        "info": {"title": "Kubernetes", "version": "v1.36.0"},
        "paths": {
            f"/{group_path}/namespaces/{{namespace}}/{plural}/{{name}}": {
                "patch": {
                    "parameters": [parameter],
                    "responses": {},
                    "x-kubernetes-group-version-kind": {"group": group, "version": number, "kind": kind},
                }
            }
            for kind, plural in KINDS[version].items()
        },
    }


def _status(code: int, reason: str, message: str) -> Object:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "reason": reason,
        "message": message,
        "code": code,
    }


def _decoded(body: bytes) -> Object:
    """An object as JSON or YAML, or a Secret as protobuf."""
    if body.startswith(b"k8s\0"):
        return _secret(dict(_fields(body[4:]))[2])
    item: Object = yaml.load(body, Loader=yaml.CSafeLoader)
    return item


def _secret(raw: bytes) -> Object:
    """k8s.io/api/core/v1 Secret: metadata, data, and type."""
    item: Object = {"metadata": {"labels": {}}, "data": {}}
    for number, value in _fields(raw):
        if number == 1:
            for field, inner in _fields(value):
                if field == 1:
                    item["metadata"]["name"] = inner.decode()
                elif field == 11:
                    pair = dict(_fields(inner))
                    item["metadata"]["labels"][pair[1].decode()] = pair[2].decode()
        elif number == 2:
            pair = dict(_fields(value))
            item["data"][pair[1].decode()] = base64.b64encode(pair[2]).decode()
        elif number == 3:
            item["type"] = value.decode()
    return item


def _fields(raw: bytes) -> Iterator[tuple[int, Any]]:
    """A protobuf message's fields: numbers as they are, everything with a length as bytes."""
    place = 0

    def varint() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = raw[place]
            place += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while place < len(raw):
        tag = varint()
        if tag & 7 == 0:
            yield tag >> 3, varint()
        else:
            assert tag & 7 == 2, "Secrets have no other kind of field"
            length = varint()
            yield tag >> 3, raw[place : place + length]
            place += length
