"""Health check of a container's replica: exit status 0 if its gRPC health service says it serves.

Images' HEALTHCHECK and the chart's probes run it. It reads the replica's own environment variables, so a
replica configured by flags needs them too. It has no certificate; a replica with TLS is asked at its health
socket.
"""

import os
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_SECONDS = 4.0


def main() -> int:
    """0: serving; 1: draining, starting, or not there."""
    socket = os.environ.get("KVASIR_REPLICA_HEALTH_SOCKET")
    if not socket and os.environ.get("KVASIR_REPLICA_TLS_CERTIFICATE"):
        sys.stderr.write("a replica with TLS tells its health at KVASIR_REPLICA_HEALTH_SOCKET only\n")
        return 1
    address = f"unix:{socket}" if socket else _port_address()
    with grpc.insecure_channel(address) as channel:
        ask = health_pb2_grpc.HealthStub(channel).Check
        try:
            answer = ask(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_SECONDS)
        except grpc.RpcError as error:
            sys.stderr.write(f"{address}: {error.code().name}\n")
            return 1
    return 0 if answer.status == health_pb2.HealthCheckResponse.SERVING else 1


def _port_address() -> str:
    host = os.environ.get("KVASIR_REPLICA_HOST", "127.0.0.1")
    port = os.environ["KVASIR_REPLICA_PORT"]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


if __name__ == "__main__":
    sys.exit(main())
