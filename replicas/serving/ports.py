"""A replica's gRPC servers: a port, with TLS or without, and a socket for health only.

Owns the servers and grpc.health's answers. Certificates, and services besides health and reflection, are
passed in.
"""

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from replicas.serving.grpc_options import SERVER_OPTIONS


def host_port(host: str, port: int) -> str:
    """Format an address, IPv6 included."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Ports:
    """`new_server`, to which the owner adds its service; then `open`, and `close` at the end."""

    def __init__(self, service_name: str) -> None:
        self._service_name = service_name
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._servers: list[grpc.aio.Server] = []

    def new_server(self, *interceptors: "grpc.aio.ServerInterceptor[Any, Any]") -> grpc.aio.Server:
        """With health and reflection."""
        server = grpc.aio.server(options=list(SERVER_OPTIONS), interceptors=interceptors)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (self._service_name, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        return server

    async def open(
        self,
        server: grpc.aio.Server,
        host: str,
        port: int,
        credentials: grpc.ServerCredentials | None,
        health_socket: str | None,
    ) -> int:
        """Listen, not yet healthy. Returns the port; raises OSError if it cannot be had."""
        await self.set_serving(False)
        bound = _bind(server, host, port, credentials)
        servers = [server]
        if health_socket is not None:
            servers.append(self._health_server(health_socket))
        for each in servers:
            await each.start()
        self._servers = servers
        return bound

    async def set_serving(self, is_serving: bool) -> None:
        """Set grpc.health's answer for the server and for the service."""
        status = health_pb2.HealthCheckResponse
        for name in ("", self._service_name):
            await self._health.set(name, status.SERVING if is_serving else status.NOT_SERVING)

    async def close(self, grace_seconds: float) -> None:
        """Take no new calls, and cut those that last longer than `grace_seconds`."""
        servers, self._servers = self._servers, []
        await asyncio.gather(*(server.stop(grace_seconds) for server in servers))

    def _health_server(self, path: str) -> grpc.aio.Server:
        """Return a server of health alone at a Unix socket, without TLS: a probe on the same machine has no
        certificate, and needs none. A socket that an earlier process left behind is replaced. Raises OSError.
        """
        server = grpc.aio.server()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        try:
            server.add_insecure_port(f"unix:{path}")
        except RuntimeError as error:
            raise OSError(f"cannot listen on the Unix socket {path}") from error
        return server


def _bind(server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None) -> int:
    """Bind a port and return it. Raises OSError if that fails."""
    address = host_port(host, port)
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address}") from error
