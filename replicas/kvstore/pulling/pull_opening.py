"""open_puller: builds a replica's puller from its settings.

Owns the credentials for peers: tokens of the cluster secret, and its own certificate where replicas have one,
whose CA theirs must share.
"""

import time

from replicas.config import ReplicaConfig
from replicas.kvstore.layout import Layout, file_bytes
from replicas.kvstore.pulling.incoming import ChunkKind
from replicas.kvstore.pulling.peers import Peers
from replicas.kvstore.pulling.pull import Puller
from replicas.process.secret_file import read_secret
from replicas.process.tls import RouterTls, TlsFiles
from replicas.protocol.cluster_secret import Purpose


def open_puller(config: ReplicaConfig, layout: Layout, payload_bytes: int, bytes_per_second: float) -> Puller:
    """Build the puller. Raises SettingsError for invalid files."""
    secret = read_secret(config.secret, config.secret_file)
    tls = None
    if config.tls_certificate is not None:
        files = TlsFiles(config.tls_certificate, config.tls_key, config.tls_client_ca)
        tls = RouterTls(files, config.tls_peer_name)
    kind = ChunkKind(
        layout=layout.digest(),
        num_tokens=config.tokens_per_chunk,
        num_blocks=config.tokens_per_chunk // config.tokens_per_block,
        payload_bytes=payload_bytes,
        image_bytes=file_bytes(payload_bytes),
    )
    peers = Peers(key=None if secret is None else secret.key(Purpose.CALLS), tls=tls, clock=time.monotonic)
    return Puller(kind, peers, bytes_per_second=bytes_per_second)
