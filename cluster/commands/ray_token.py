"""Checks that a Ray cluster asks for a token; without one, anyone who reaches its ports can run code.

Asks without a token, as a stranger would.
"""

import grpc

from cluster.errors import ClusterError

METHOD = "/ray.rpc.NodeInfoGcsService/CheckAlive"
TIMEOUT_SECONDS = 10.0


def refuse_open(gcs_address: str) -> None:
    """Raise ClusterError if the Ray cluster accepts calls without a token."""
    if not asks_for_token(gcs_address):
        raise ClusterError(
            f"the Ray cluster at {gcs_address} asks for no token, so anyone who reaches it can run code: "
            "start Ray with RAY_AUTH_MODE=token, or give --without-token"
        )


def asks_for_token(gcs_address: str) -> bool:
    """Whether Ray's control service rejects a caller without a token. Any other answer, or none, counts as
    no."""
    with grpc.insecure_channel(gcs_address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            channel.unary_unary(METHOD, None, None)(b"", timeout=TIMEOUT_SECONDS)
        except grpc.RpcError as error:
            return bool(error.code() is grpc.StatusCode.UNAUTHENTICATED)
    return False
