"""Finds the cluster of a command: that of its run directory or at `--url`, and the key for it."""

import argparse
from collections.abc import Mapping

from cluster.errors import NotRunning
from cluster.local.run_directory import ClusterState, RunDirectory

KEY_PREFIX = "sk-kvasir-"


def running_cluster(arguments: argparse.Namespace, remedy: str = "") -> ClusterState:
    """Return the running cluster. Raises NotRunning; `remedy` says what else the command accepts."""
    directory = RunDirectory(arguments.run_dir)
    state = directory.read_state() if directory.owner() is not None else None
    if state is None:
        start = f"start one with {directory.command('up')}"
        raise NotRunning(f"no cluster runs in {directory.path}; {' or '.join(filter(None, (start, remedy)))}")
    return state


def router_url(arguments: argparse.Namespace) -> str:
    """Return the named router, or that of the running cluster. Raises NotRunning."""
    url: str | None = arguments.url
    if url is None:
        url = running_cluster(arguments, "give --url").router_url
    return url.rstrip("/").removesuffix("/v1")


def page_url(arguments: argparse.Namespace) -> str:
    """Return the address for explanations: the first of several routers. Raises NotRunning."""
    if arguments.url is not None:
        return router_url(arguments)
    return running_cluster(arguments, "give --url").router_pages[0]


def own_key(environment: Mapping[str, str]) -> str | None:
    """Return the API key from the environment. OPENAI_API_KEY counts only if it is one of ours."""
    key = environment.get("KVASIR_API_KEY")
    if key:
        return key
    other = environment.get("OPENAI_API_KEY", "")
    return other if other.startswith(KEY_PREFIX) else None


def key_headers(arguments: argparse.Namespace) -> dict[str, str]:
    return {} if arguments.api_key is None else {"authorization": f"Bearer {arguments.api_key}"}
