"""Opens what the settings name before a replica starts: TLS files, cluster secret, traces.

Owns the warnings for missing settings.
"""

import logging

from replicas.config import ReplicaConfig
from replicas.observation.trace_points import Tracing
from replicas.process.secret_file import open_secret_complaint, read_secret
from replicas.process.tls import FollowedFiles, RouterTls, TlsFiles
from replicas.protocol.cluster_secret import ClusterSecret
from replicas.protocol.status import Epoch

logger = logging.getLogger(__name__)


def open_tls(config: ReplicaConfig) -> FollowedFiles | None:
    if config.tls_certificate is None:
        return None
    return FollowedFiles(TlsFiles(config.tls_certificate, config.tls_key, config.tls_client_ca))


def open_peer_tls(config: ReplicaConfig) -> RouterTls | None:
    """Open the TLS files of a caller of other replicas, with its own certificate."""
    if config.tls_certificate is None:
        return None
    files = TlsFiles(config.tls_certificate, config.tls_key, config.tls_client_ca)
    return RouterTls(files, config.tls_peer_name)


def open_secret(config: ReplicaConfig) -> ClusterSecret | None:
    secret = read_secret(config.secret, config.secret_file)
    if secret is None:
        logger.warning(
            "there is no cluster secret: the lease is not signed, anyone who reaches the port may call; set"
            " secret_file, as for routers"
        )
    for file in (config.secret_file, config.engine_key_file):
        if (complaint := open_secret_complaint(file)) is not None:
            logger.warning(complaint)
    return secret


def open_tracing(config: ReplicaConfig, epoch: Epoch, model: str) -> Tracing:
    if config.otlp_endpoint is None:
        return Tracing()
    from replicas.observation.tracing import (
        SpanTracing,  # here, since a replica without traces must not load the SDK
    )

    return SpanTracing(
        config.otlp_endpoint,
        config.trace_sample_ratio,
        replica_id=config.replica_id,
        epoch=epoch,
        model=model,
    )
