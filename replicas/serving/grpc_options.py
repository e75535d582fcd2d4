"""Options of a replica's gRPC server, among them how it notices that a router is gone."""

from collections.abc import Sequence

SERVER_OPTIONS: Sequence[tuple[str, int]] = (
    # A tokenizer bundle of a large vocabulary is tens of MiB, a frame of long prompts a few; 4 MiB, the
    # default, is too little for both.
    ("grpc.max_send_message_length", 64 * 2**20),
    ("grpc.max_receive_message_length", 64 * 2**20),
    # A router whose machine vanished says nothing: pings find out, and its requests are freed.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Routers ping us for the same reason; the default (300 s) would end their connection as abuse.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
    # One Serve stream per router process and a few short calls: more on one connection is a bug or worse.
    ("grpc.max_concurrent_streams", 128),
    # Two replicas on one port would each get half of the connections; the second must fail instead.
    ("grpc.so_reuseport", 0),
)
