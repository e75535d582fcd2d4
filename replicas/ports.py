"""Where a replica's gRPC servers listen: a port, with TLS or without, and a socket that only tells health.

Owns no service and no certificate: both are handed in.
"""

import grpc
from grpc_health.v1 import health, health_pb2_grpc


def host_port(host: str, port: int) -> str:
    """As addresses are written, those of IPv6 too."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bind(server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None) -> int:
    """The port that was taken. Raises OSError if there is none to be had."""
    address = host_port(host, port)
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address}") from error


def health_server(health_servicer: health.aio.HealthServicer, path: str) -> grpc.aio.Server:  # type: ignore[name-defined]
    """A server of health alone at a Unix socket, without TLS: whoever probes a replica from beside it has no
    certificate, and needs none. A socket that an earlier process left behind is replaced. Raises OSError."""
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    try:
        server.add_insecure_port(f"unix:{path}")
    except RuntimeError as error:
        raise OSError(f"cannot listen on the Unix socket {path}") from error
    return server
