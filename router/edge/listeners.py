"""The sockets of a router: the clients' port, and the operators' ports or Unix sockets.

Each of several router processes has a socket of its own at the clients' port, over which the kernel spreads
connections, and all have all of them open: connections at one that does not accept can be taken by others.
Each has an operators' socket to itself. Owns binding and removal.
"""

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from replicas.process.settings import SettingsError
from router.config import RouterConfig

BACKLOG = 2048

SEND_BUFFER_BYTES = 64 * 1024
"""Unread bytes of an answer that the system may buffer; its default is megabytes."""


@dataclass(frozen=True, slots=True)
class Listeners:
    """Listeners of one process. `admin` is None if `main` serves everything; `others` are the siblings'
    sockets."""

    main: socket.socket
    admin: socket.socket | None
    others: tuple[socket.socket, ...] = ()


@dataclass(frozen=True, slots=True)
class AllListeners:
    """Listeners of all processes; `admins` is empty if the clients' port serves everything."""

    mains: tuple[socket.socket, ...]
    admins: tuple[socket.socket, ...]

    def of(self, number: int) -> Listeners:
        """Return the listeners of one process, in that process, which closes the others."""
        for other, admin in enumerate(self.admins):
            if other != number:
                admin.close()
        others = (*self.mains[:number], *self.mains[number + 1 :])
        return Listeners(self.mains[number], self.admins[number] if self.admins else None, others)


@contextlib.contextmanager
def listening(config: RouterConfig) -> Iterator[AllListeners]:
    """The bound sockets, before anything else is built. Raises SettingsError if that cannot be."""
    with contextlib.ExitStack() as stack:
        mains, admins = [], []
        if config.processes == 1:
            mains = [stack.enter_context(_at_port(config.host, config.port))]
        else:
            with _at_port(config.host, config.port) as alone:  # no other process is to share the port
                port = alone.getsockname()[1]
            for _ in range(config.processes):
                mains.append(stack.enter_context(_at_port(config.host, port, is_shared=True)))
        if config.has_admin_listener:
            admins = [stack.enter_context(_admin(config, number)) for number in range(config.processes)]
        yield AllListeners(tuple(mains), tuple(admins))


def _admin(config: RouterConfig, number: int) -> contextlib.AbstractContextManager[socket.socket]:
    if config.admin_socket is not None:
        path = config.admin_socket if config.processes == 1 else f"{config.admin_socket}.{number}"
        return _at_path(Path(path))
    return _at_port(config.admin_host, config.admin_port + number if config.admin_port else 0)


def address_of(listener: socket.socket) -> str:
    """For the log: `http://HOST:PORT`, or the path of a Unix socket."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextlib.contextmanager
def _at_port(host: str, port: int, *, is_shared: bool = False) -> Iterator[socket.socket]:
    with contextlib.ExitStack() as stack:
        try:
            family, _, _, _, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            listener = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if is_shared:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            listener.bind(address)
            listener.listen(BACKLOG)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            where = f"{host} port {port}"
            raise SettingsError(f"the router cannot listen on {where}: {reason}") from error
        yield listener


@contextlib.contextmanager
def _at_path(path: Path) -> Iterator[socket.socket]:
    """Bind a socket for this user alone: before `listen` no process can connect, and by then it has its
    mode."""
    with contextlib.ExitStack() as stack:
        try:
            _remove_left_over(path)
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            listener.bind(str(path))
            stack.callback(path.unlink, missing_ok=True)
            path.chmod(stat.S_IRUSR | stat.S_IWUSR)
            listener.listen(BACKLOG)
        except OSError as error:
            reason = error.strerror or str(error)
            raise SettingsError(f"the router cannot listen on {path}: {reason}") from error
        yield listener


def _remove_left_over(path: Path) -> None:
    """A router that was killed has left its socket behind; one that lives is left alone."""
    try:
        if not stat.S_ISSOCK(path.stat().st_mode):
            return
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            os.unlink(path)
