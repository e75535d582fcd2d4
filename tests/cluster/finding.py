"""Pools that find servers which run already."""

from typing import Any

from cluster.config import EACH_SERVER, EngineSource, PoolSpec
from replicas.config import ReplicaConfig


def finding(name: str = "p", **source: Any) -> PoolSpec:
    replica = ReplicaConfig(engine="remote", engine_url=EACH_SERVER, model_name="m")
    return PoolSpec(0, name, replica, engines=EngineSource(**(source or {"urls": ("http://a:1",)})))
