"""The cluster that a command is about: the one of its run directory or at its `--url`, and the key for it."""

import argparse
from collections.abc import Mapping

from cluster.errors import NotRunning
from cluster.local.run_directory import ClusterState, RunDirectory

KEY_PREFIX = "sk-kvasir-"


def running_cluster(arguments: argparse.Namespace, remedy: str = "") -> ClusterState:
    """The cluster that runs here. Raises NotRunning, with what else the command takes: `remedy`."""
    directory = RunDirectory(arguments.run_dir)
    state = directory.read_state() if directory.owner() is not None else None
    if state is None:
        start = f"start one with {directory.command('up')}"
        raise NotRunning(f"no cluster runs in {directory.path}; {' or '.join(filter(None, (start, remedy)))}")
    return state


def router_url(arguments: argparse.Namespace) -> str:
    """The router that was named, or that of the cluster that runs here. Raises NotRunning."""
    url: str | None = arguments.url
    if url is None:
        url = running_cluster(arguments, "give --url").router_url
    return url.rstrip("/").removesuffix("/v1")


def page_url(arguments: argparse.Namespace) -> str:
    """Where explanations are: of several routers that run here, the first. Raises NotRunning."""
    if arguments.url is not None:
        return router_url(arguments)
    return running_cluster(arguments, "give --url").router_pages[0]


def own_key(environment: Mapping[str, str]) -> str | None:
    """The API key that the environment has. That of another service, which clients call OPENAI_API_KEY, too,
    is nothing to send here."""
    key = environment.get("KVASIR_API_KEY")
    if key:
        return key
    other = environment.get("OPENAI_API_KEY", "")
    return other if other.startswith(KEY_PREFIX) else None


def key_headers(arguments: argparse.Namespace) -> dict[str, str]:
    return {} if arguments.api_key is None else {"authorization": f"Bearer {arguments.api_key}"}
