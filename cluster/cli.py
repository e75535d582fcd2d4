"""The `kvasir` command: up, down, status, chat and all others, with what other packages add.

Owns the command line, the environment (no other module reads it), exit codes and what is printed. Imports
what a command needs when that command runs, so that `--help` and `status` answer at once.
"""

import argparse
import os
import select
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from cluster.commands.added import added_commands
from cluster.commands.running import key_headers, own_key, page_url, router_url, running_cluster
from cluster.errors import ClusterError
from cluster.local.run_directory import RunDirectory, default_run_directory
from cluster.sizes import size

MOST_REPLICAS = 512
MOST_ROUTERS = 64
READER_GONE = 141
"""Exit status of a program that ends because its pipe closed: 128 + SIGPIPE."""

LINT = "show where the prompts of a log of requests break their prefixes"


class _Parser(argparse.ArgumentParser):
    """Reports errors in one sentence, without the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            return _run(words)
        finally:
            sys.stdout.flush()  # --help has only filled its buffer
    except BrokenPipeError:
        gone = [stream for stream in (sys.stdout, sys.stderr) if _has_lost_its_reader(stream.fileno())]
        if not gone:
            raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in gone:  # for what is flushed as the interpreter ends
            os.dup2(nowhere, stream.fileno())
        return READER_GONE


def _has_lost_its_reader(descriptor: int) -> bool:
    """Whether the reader of the output is gone, as after `head`."""
    asked = select.poll()
    asked.register(descriptor, 0)
    return any(event & select.POLLERR for _, event in asked.poll(0))


def _run(words: list[str]) -> int:
    commands = {
        "up": _up,
        "down": _down,
        "status": _status,
        "chat": _chat,
        "fleet": _fleet,
        "join": _join,
        "keys": _keys,
        "explain": _explain,
        "where": _where,
        "usage": _usage,
        "why": _why,
        "lint": _lint,
    }
    added = added_commands()
    names = [*commands, *added]
    if words and not words[0].startswith("-") and words[0] not in names:
        return _complain(f"there is no command {words[0]}; there are {', '.join(names)}, docs and test")
    try:
        arguments = _parser(os.environ, words[0] if words else "").parse_args(words)
        if getattr(arguments, "api_key", "") is None:
            arguments.api_key = own_key(os.environ)
        if arguments.command in added:
            return added[arguments.command].run(arguments, _say)
        return commands[arguments.command](arguments)
    except ClusterError as error:
        _complain(str(error))
        return error.exit_code


def _complain(sentence: str) -> int:
    print(f"kvasir: {sentence}", file=sys.stderr, flush=True)
    return 2


def _say(sentence: str) -> None:
    print(sentence, flush=True)


def _parser(environment: Mapping[str, str], command: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="kvasir",
        description="A serving cluster in which a prompt goes to the replica that holds its KV blocks.",
        epilog="`kvasir COMMAND --help` explains a command. `./kvasir docs` shows the documentation, "
        "and `./kvasir test` checks the code.",
        allow_abbrev=False,
    )
    common = _Parser(add_help=False)
    common.add_argument(
        "--run-dir",
        type=Path,
        default=default_run_directory(Path.cwd(), environment),
        metavar="DIR",
        help="directory for the cluster's state and logs; each cluster needs its own (default: %(default)s)",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)
    _add_up(
        commands.add_parser(
            "up", parents=[common], allow_abbrev=False, help="start a cluster on this machine"
        )
    )
    commands.add_parser(
        "down",
        parents=[common],
        allow_abbrev=False,
        help="stop the cluster on this machine, whatever its state",
    )
    status = commands.add_parser(
        "status", parents=[common], allow_abbrev=False, help="show what runs and how busy it is"
    )
    status.add_argument("--json", action="store_true", help="print it as JSON")
    _add_chat(commands.add_parser("chat", parents=[common], allow_abbrev=False, help="talk to a model"))
    _add_with_modules(commands, common, command)
    for name, what in (
        ("explain", "show where a prompt would go, and why, without sending it"),
        ("where", "show which replicas hold a prompt or a block, according to Redis"),
    ):
        _add_explain(commands.add_parser(name, parents=[common], allow_abbrev=False, help=what))
    for name, added in added_commands().items():
        parents = [common] if added.has_run_directory else []
        subparser = commands.add_parser(name, parents=parents, allow_abbrev=False, help=added.help)
        if command == name:
            added.add_arguments(subparser)
    return parser


def _add_with_modules(commands: "argparse._SubParsersAction[_Parser]", common: _Parser, command: str) -> None:
    """Add commands whose arguments another module defines; import only the module of the command that
    runs."""
    fleet = commands.add_parser(
        "fleet", allow_abbrev=False, help="keep replicas on a Ray cluster as a file describes"
    )
    if command == "fleet":
        from cluster.commands.fleet import add_arguments

        add_arguments(fleet)
    join = commands.add_parser(
        "join", allow_abbrev=False, help="run replicas for the servers that a fleet file finds, without Ray"
    )
    if command == "join":
        from cluster.commands.join import add_arguments as add_join

        add_join(join)
    keys = commands.add_parser("keys", allow_abbrev=False, help="make and revoke API keys, and limit tenants")
    if command == "keys":
        from cluster.commands.key_arguments import add_arguments as add_key_arguments

        add_key_arguments(keys, common)
    used = commands.add_parser(
        "usage", parents=[common], allow_abbrev=False, help="show what tenants and keys have used"
    )
    if command == "usage":
        from cluster.commands.usage import add_arguments as add_usage

        add_usage(used)
        _add_api_key(used)
    asked = commands.add_parser(
        "why", parents=[common], allow_abbrev=False, help="say why a request's prompt was not read from cache"
    )
    if command == "why":
        from cluster.commands.why import add_arguments as add_why

        add_why(asked)
        _add_api_key(asked)
    _add_lint(commands.add_parser("lint", allow_abbrev=False, help=LINT))


def _add_up(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--replicas", type=_replica_count, default=2, metavar="N", help="number of replicas (default: 2)"
    )
    parser.add_argument(
        "--routers",
        type=_router_count,
        default=1,
        metavar="N",
        help="number of router processes that share the port (default: 1)",
    )
    parser.add_argument(
        "--engine",
        choices=("torch", "vllm", "simulated", "openai"),
        default="torch",
        help="default: torch; openai is for servers to join that take clients' bodies, not tokens",
    )
    _add_join(parser)
    parser.add_argument("--model", metavar="DIR", help="checkpoint directory (default: the toy model)")
    parser.add_argument(
        "--model-name",
        metavar="NAME",
        help="model name that clients use (default: the directory's); --set model_aliases=A,B adds others",
    )
    parser.add_argument(
        "--ram",
        type=size,
        metavar="SIZE",
        help="host memory for KV below the device, a replica (default: none)",
    )
    parser.add_argument(
        "--disk",
        type=size,
        metavar="SIZE",
        help="disk for KV below that, a replica, in the run directory; the next `up` finds what is there "
        "(default: none)",
    )
    parser.add_argument(
        "--prefill",
        type=_replica_count,
        metavar="N",
        help="this many of the replicas compute prompts that the others decode, where that should be sooner; "
        "with --ram 256MiB and pulls, if nothing else is said (default: each does both)",
    )
    _add_ways_in(parser)
    parser.add_argument(
        "--policy", default="kvasir", metavar="NAME", help="routing policy (default: %(default)s)"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of the replicas; repeatable",
    )


def _add_join(parser: argparse.ArgumentParser) -> None:
    """Add the options for servers that run already."""
    parser.add_argument(
        "--join",
        action="append",
        default=[],
        metavar="URL",
        help="a vLLM or SGLang server that runs already, such as http://127.0.0.1:8000, in place of replicas"
        " of ours; repeatable",
    )
    parser.add_argument(
        "--join-file",
        metavar="FILE",
        help="a file with such addresses, one a line, instead: it is read again while the cluster runs",
    )
    parser.add_argument(
        "--join-dns",
        metavar="URL",
        help="an address with a name whose every IP address is a server's, instead: it is asked again",
    )
    parser.add_argument("--join-key-file", metavar="FILE", help="file with the API key of those servers")


def _add_ways_in(parser: argparse.ArgumentParser) -> None:
    """Add the options for the address of `up` and for access to it."""
    parser.add_argument("--host", default="127.0.0.1", help="where the router listens (default: %(default)s)")
    parser.add_argument(
        "--port", type=_port, default=8000, help="the router's port, 0 for a free one (default: %(default)s)"
    )
    parser.add_argument(
        "--picker-port",
        type=_port,
        metavar="PORT",
        help="gRPC port at which gateways ask the router as their endpoint picker (default: none)",
    )
    parser.add_argument(
        "--keys",
        metavar="FILE",
        help="tenants and API keys, as `kvasir keys` writes them; without, all clients are one tenant",
    )
    parser.add_argument(
        "--open",
        action="store_true",
        help="listen on another --host than loopback although there are no keys",
    )
    parser.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="let pages of this origin, such as https://chat.example.org, call the API from their visitors' "
        "browsers; repeatable; * lets every page",
    )


def _add_chat(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url", help="a router (default: the cluster that runs here; without one, chat starts its own)"
    )
    _add_api_key(parser)
    parser.add_argument("--model", metavar="NAME", help="model name (default: the first model)")
    parser.add_argument("--user", help="the requests' user")
    parser.add_argument("--max-tokens", type=_positive, metavar="N", help="maximum length of an answer")


def _add_api_key(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help="an API key (default: KVASIR_API_KEY, or OPENAI_API_KEY if that is one of ours)",
    )


def _add_explain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help="the user's message; for `where` also a block hash")
    parser.add_argument("--file", metavar="FILE", help="JSON instead: a list of messages or a whole request")
    parser.add_argument(
        "--completion", action="store_true", help="send the prompt as plain text instead of a chat"
    )
    _add_api_key(parser)
    parser.add_argument("--model", metavar="NAME", help="model name (default: the first model)")
    parser.add_argument("--prompt-cache-key", metavar="KEY", help="the request's value")
    parser.add_argument("--cache-salt", metavar="SALT", help="the request's value")
    parser.add_argument(
        "--url",
        help="a router, at its admin port if it has one (default: that of the cluster that runs here)",
    )
    parser.add_argument(
        "--redis-url", help="for `where`: Redis (default: that of the cluster that runs here)"
    )
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")


def _add_lint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file",
        metavar="FILE",
        help="a request body as JSON in each line, or an object with `body` and, if known, `path` and"
        " `tenant`; packed by gzip or not; - is the standard input",
    )
    parser.add_argument(
        "--model",
        metavar="DIR",
        help="checkpoint directory with the tokenizer and the chat template (default: the toy model)",
    )
    parser.add_argument(
        "--block-size", type=_positive, default=16, metavar="N", help="tokens of a block (default: 16)"
    )
    parser.add_argument(
        "--prefill-rate",
        type=_positive,
        metavar="N",
        help="prompt tokens that a replica computes in a second; with it, lost time is shown",
    )
    parser.add_argument(
        "--tolerate",
        type=_percent,
        default=0.0,
        metavar="PERCENT",
        help="share of the prompt tokens that may be lost without an exit status of 1 (default: 0)",
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def _percent(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 100:
        raise argparse.ArgumentTypeError(f"needs a number from 0 to 100, not {text}")
    return value


def _replica_count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MOST_REPLICAS:
        raise argparse.ArgumentTypeError(f"needs a whole number from 1 to {MOST_REPLICAS}, not {text}")
    return int(text)


def _router_count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MOST_ROUTERS:
        raise argparse.ArgumentTypeError(f"needs a whole number from 1 to {MOST_ROUTERS}, not {text}")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"needs a whole number above 0, not {text}")
    return int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**16:
        raise argparse.ArgumentTypeError(f"needs a whole number from 0 to 65535, not {text}")
    return int(text)


def _up(arguments: argparse.Namespace) -> int:
    if arguments.model and not Path(arguments.model).is_dir():  # said before anything slow is imported
        raise ClusterError(f"there is no checkpoint directory {Path(arguments.model).absolute()}")

    from cluster.local.processes import MARK
    from cluster.local.ray_head import RAY_ENVIRONMENT, TOKEN_PATH

    directory = RunDirectory(arguments.run_dir)
    # Ray takes its settings from here alone, as it is imported, and hands the mark on to its workers.
    for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN"):
        os.environ.pop(name, None)
    os.environ.update(
        {**RAY_ENVIRONMENT, TOKEN_PATH: str(directory.ray_token_file), MARK: str(directory.path)}
    )
    from cluster.commands.up import options_from, serve

    return serve(options_from(arguments, directory, dict(os.environ)), _say)


def _down(arguments: argparse.Namespace) -> int:
    from cluster.commands.down import take_down

    _say(take_down(RunDirectory(arguments.run_dir)))
    return 0


def _status(arguments: argparse.Namespace) -> int:
    state = running_cluster(arguments)

    import json

    from cluster.commands.status import as_plain, ask_programs, render
    from cluster.registry import read_registry

    registry = read_registry(state.redis_url)
    programs = ask_programs(state.router_pages)
    if arguments.json:
        _say(json.dumps(as_plain(state, registry, programs), indent=2))
    else:
        _say(render(state, registry, programs))
    return 0


def _chat(arguments: argparse.Namespace) -> int:
    import contextlib

    import httpx

    from cluster.commands.chat import Chat, converse, first_model
    from cluster.commands.down import own_cluster

    with contextlib.ExitStack() as stack:
        url = arguments.url
        if url is None:
            directory = RunDirectory(arguments.run_dir)
            state = directory.read_state() if directory.owner() is not None else None
            if state is None:
                sentence = f"No cluster runs in {directory.path}: starting one for this chat."
                print(sentence, file=sys.stderr, flush=True)
                state = stack.enter_context(own_cluster(directory))
            url = state.router_url
        timeout = httpx.Timeout(10.0, read=600.0)
        base = url.rstrip("/").removesuffix("/v1")
        headers = key_headers(arguments)
        client = stack.enter_context(
            httpx.Client(base_url=base, headers=headers, timeout=timeout, trust_env=False)
        )
        model = arguments.model or first_model(client)
        if sys.stdin.isatty():
            _say(f"{model} at {base}. /help shows the commands.")
        chat = Chat(client, model, sys.stdout, user=arguments.user, max_tokens=arguments.max_tokens)
        converse(chat, sys.stdin)
    return 0


def _fleet(arguments: argparse.Namespace) -> int:
    # Ray reads it when it is imported: else it copies this directory and builds an environment for workers.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    from cluster.commands.fleet import run

    answers = sys.stdout  # Ray gets another one
    return run(arguments, dict(os.environ), lambda text: print(text, file=answers, flush=True))


def _join(arguments: argparse.Namespace) -> int:
    from cluster.commands.join import run

    return run(arguments, os.environ, _say)


def _keys(arguments: argparse.Namespace) -> int:
    from cluster.commands.key_store import KeyFileStore, KeyRedisStore
    from cluster.commands.keys import run
    from replicas.process.secret_file import open_secret_complaint

    def tell(sentence: str) -> None:
        print(sentence, file=sys.stderr, flush=True)

    if arguments.redis_url is not None:
        if arguments.file is not None or arguments.secret_file is None:
            raise ClusterError("--redis-url needs --secret-file, and no --file")
        if (complaint := open_secret_complaint(arguments.secret_file)) is not None:
            tell(complaint)
        return run(arguments, KeyRedisStore(arguments.redis_url, arguments.secret_file), _say, tell)
    file = arguments.file
    if file is None:
        state = running_cluster(arguments, "say with --file which keys are meant")
        if state.keys_file is None:
            raise ClusterError("the cluster that runs here has no keys; start it with up --keys FILE")
        file = Path(state.keys_file)
    return run(arguments, KeyFileStore(file), _say, tell)


def _explain(arguments: argparse.Namespace) -> int:
    from cluster.commands.explain import explain

    return explain(arguments, page_url(arguments), _say)


def _where(arguments: argparse.Namespace) -> int:
    from cluster.commands.where import where

    redis_url = arguments.redis_url
    if redis_url is None:
        redis_url = running_cluster(arguments, "give --redis-url").redis_url
    return where(arguments, lambda: page_url(arguments), redis_url, _say)


def _usage(arguments: argparse.Namespace) -> int:
    import time

    from cluster.commands.usage import usage

    return usage(arguments, router_url(arguments), arguments.api_key, time.time(), _say)


def _why(arguments: argparse.Namespace) -> int:
    from cluster.commands.why import why

    url = router_url(arguments) if arguments.tenant is None else page_url(arguments)
    return why(arguments, url, arguments.api_key, _say)


def _lint(arguments: argparse.Namespace) -> int:
    from cluster.commands.lint import lint

    return lint(arguments, _say)


if __name__ == "__main__":
    sys.exit(main())
