"""NixlParts: the two parts of a split at vLLM servers whose connector is NIXL, as its sources have it (0.32).

Owns what the first server is asked, and what of its answer goes to the second: only all of it, for the same
prompt, in time, and once. vLLM itself minds none of these. After a lease it reads what lies there by then,
without an error, and caches it under the prompt's hash; and params that lack a key end the whole server.
"""

import logging
import time
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from replicas.engine import EngineRequest, RequestRefused
from replicas.protocol.frames import RefusalCode, Submit
from replicas.protocol.split_handover import SplitHandover, prompt_named, read_handover
from replicas.remote_engine.dialect import Chunk, Reader

logger = logging.getLogger(__name__)

PARAMS = "kv_transfer_params"

_ASKED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_NOT_OF_A_FIRST_PART = ("stream_options", "structured_outputs", "logprobs", "return_tokens_as_token_ids")

ADVICE = 'start it with --kv-transfer-config \'{"kv_connector": "NixlConnector", "kv_role": "kv_both"}\''

_Name = Annotated[str, Meta(min_length=1, max_length=1024)]


class _Params(Struct):
    """The params that must be there. Without blocks the second server fails as well."""

    do_remote_prefill: bool
    do_remote_decode: bool
    remote_engine_id: _Name
    remote_request_id: _Name
    remote_host: _Name
    remote_port: Annotated[int, Meta(ge=1, le=65535)]
    remote_block_ids: list[list[Annotated[int, Meta(ge=0)]]]
    transfer_mode: str = "pull"

    @property
    def is_whole(self) -> bool:
        is_offer = self.do_remote_prefill and not self.do_remote_decode and self.transfer_mode == "pull"
        return is_offer and any(self.remote_block_ids)


class _Answer(Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw()


_answers = msgspec.json.Decoder(_Answer)


def whole_params(content: bytes | msgspec.Raw) -> dict[str, Any] | None:
    """Parse a server's params; None if a second server could not do with them."""
    try:
        said = msgspec.json.decode(content)
        return said if msgspec.convert(said, _Params).is_whole else None
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


class SecondPart:
    """The params that go with one request, if they may when it is sent. That is in the thread of HTTP; the
    engine's looks at `is_sent` when an answer has come."""

    def __init__(self, handover: SplitHandover, params: Mapping[str, Any], warn: "Warnings") -> None:
        self.is_sent = False
        self._handover = handover
        self._params = params
        self._warn = warn
        self._since = time.monotonic()

    def fields(self) -> Mapping[str, Any]:
        """Return the fields of the body, for this one time."""
        waited = time.monotonic() - self._since
        if self.is_sent or not self._handover.is_usable(waited, time.time()):
            self._warn("it is too old, or the clocks of the replicas' hosts differ")
            return {}
        self.is_sent = True
        return {PARAMS: self._params}


class Warnings:
    """Says each reason once."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def __call__(self, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            logger.warning("a prompt is computed though another server has computed it for this: %s", reason)


class NixlParts:
    """Makes the parts that one server takes. It keeps KV for others for `lease_seconds`."""

    def __init__(self, lease_seconds: float) -> None:
        self._lease_seconds = lease_seconds
        self._warn = Warnings()
        self._has_warned = False
        self._spent: dict[str, float] = {}
        """Requests of first servers whose KV was taken within a lease, and when."""

    def first_body(self, body: Mapping[str, Any], submit: Submit) -> dict[str, Any]:
        """Return the body of a first part. Params come only with an answer that does not stream. Raises
        RequestRefused."""
        if submit.num_choices != 1:
            raise RequestRefused(RefusalCode.INVALID_REQUEST, "a prompt is computed for others once")
        kept = {name: value for name, value in body.items() if name not in _NOT_OF_A_FIRST_PART}
        return {**kept, "stream": False, "max_tokens": 1, "min_tokens": 0, PARAMS: _ASKED}

    def first_reader(self, submit: Submit, read: Reader) -> Reader:
        """Read the whole answer as an event, and its params besides."""
        since = time.monotonic()

        def read_whole(answer: bytes) -> Chunk:
            took = time.monotonic() - since
            params = whole_params(_answers.decode(answer).kv_transfer_params)
            if params is None:
                self._warn_of_no_params()
                return read(answer)
            handover = SplitHandover(
                msgspec.json.encode(params), prompt_named(submit), self._lease_seconds, took, time.time()
            )
            return read(answer)._replace(handover=handover.packed())

        return read_whole

    def second_part(self, request: EngineRequest) -> SecondPart | None:
        """Return what goes with the first choice of a second part; None if the prompt is to be computed."""
        submit = request.submit
        if request.key.choice:  # the KV is given back once it was read
            return None
        handover = read_handover(submit.handover)
        params = None if handover is None else whole_params(handover.params)
        if handover is None or params is None:
            self._warn("what that says is not whole")
        elif handover.prompt != prompt_named(submit):
            self._warn("that was another prompt")
        elif self._is_spent(params):
            self._warn("its KV was taken before")
        else:
            return SecondPart(handover, params, self._warn)
        return None

    def _is_spent(self, params: Mapping[str, Any]) -> bool:
        now, name = time.monotonic(), f"{params['remote_engine_id']} {params['remote_request_id']}"
        while self._spent and next(iter(self._spent.values())) < now - self._lease_seconds:
            del self._spent[next(iter(self._spent))]
        if name in self._spent:
            return True
        self._spent[name] = now
        return False

    def _warn_of_no_params(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("the server hands no prompt over, or not all that it takes: %s", ADVICE)
