"""Passed routes: bodies that go to a server as they are, and come back as answers of any type.

Owns a passed request's way through the router: it is one prompt without tokens of its own, which goes to the
replica with the fewest requests. Of a body only the model's name is read, and of an answer nothing here.
"""

import hashlib
from collections.abc import Callable, Sequence

from replicas.protocol.blocks import unpack_token_ids
from replicas.protocol.frames import MAX_BODY_BYTES, BodyForm, PromptUsage, SamplingParams, Submit, TokenDelta
from replicas.protocol.passed_routes import MOST_TYPE_CHARACTERS, ROUTES, model_in
from router.answers.parts import Part
from router.api.api_request import ApiRequest, Prepare, Prompt, tenant_label
from router.api.context import ApiContext, Runs
from router.api.json_body import missing
from router.api.relayed import RelayedOutput, RelayWriter
from router.api.serving import Exchange, GenerationEndpoint
from router.edge.http import Header, header
from router.edge.http_error import HttpError
from router.errors import InvalidRequest, about_model
from router.generation import Generation
from router.prompt.catalog import ModelCatalog, ServedModel
from router.routing.bucket import BUCKET_BYTES

_UNREAD = ("prepared", "started")
"""Hooks that look into prompts and bodies."""


def passed_endpoints(
    context: ApiContext, prepare: Prepare, exchange: type[Exchange]
) -> Callable[[str], GenerationEndpoint | None]:
    """Find the endpoint of a path that a server of some model has, other than those that generate."""
    unread = context.without_hooks(*_UNREAD)
    endpoints = {
        path: GenerationEndpoint(unread, path.strip("/").replace("/", "_"), prepare, exchange)
        for path in ROUTES
    }

    def endpoint_of(path: str) -> GenerationEndpoint | None:
        endpoint = endpoints.get(path)
        return endpoint if endpoint is not None and path in context.catalog.routes() else None

    return endpoint_of


async def prepare_passed(context: ApiContext, asked: ApiRequest) -> None:
    """Raises InvalidRequest and UnknownModel."""
    content_type = (header(asked.scope, b"content-type") or b"application/json").decode("latin-1")
    try:
        if len(content_type) > MOST_TYPE_CHARACTERS:
            raise ValueError("its content type is too long")
        if len(asked.body) > MAX_BODY_BYTES:
            raise ValueError(f"servers are sent up to {MAX_BODY_BYTES} bytes")
        name = model_in(content_type, asked.body)
    except ValueError as error:
        raise InvalidRequest(f"The request body cannot be read: {error}.", code="invalid_body") from error
    model = _model_of(context.catalog, asked.path, name)
    output = PassedOutput(model)
    asked.model, asked.asked_model = model, name or model.name
    asked.prompts = [Prompt(_generation(context, asked, model, content_type), 0, [output])]
    asked.writer, asked.stream = RelayWriter(context.new_id("passed-"), output), True


def _model_of(catalog: ModelCatalog, path: str, name: str | None) -> ServedModel:
    """Raises UnknownModel, and InvalidRequest for a model without the route, or where one must be named."""
    names = catalog.routes().get(path, [])
    if name is None:
        if len(names) != 1:
            raise missing("model")
        return catalog.get(names[0])
    with about_model(name):
        model = catalog.get(name)
        if path not in model.card.routes:
            words = (
                f"The servers of model {name} do not have {path}. It is passed on for: {', '.join(names)}."
            )
            raise InvalidRequest(words, parameter="model")
    return model


def _generation(context: ApiContext, asked: ApiRequest, model: ServedModel, content_type: str) -> Generation:
    """Its few tokens name the body, so that one which ends servers is known again."""
    caller, root = asked.caller, model.root(asked.caller.namespace)
    named = hashlib.blake2b(asked.body, digest_size=BUCKET_BYTES, person=b"kvasir-passed-v1").digest()
    submit = Submit(
        submit_id=0,
        packed_tokens=named,
        sampling=SamplingParams(max_tokens=1),
        root=root,
        adapter=None if model.adapter is None else model.adapter.name,
        tenant=context.catalog.tenant_tag(caller.owner),
        body=asked.body,
        body_form=BodyForm.PASSED,
        route=asked.path,
        content_type=content_type,
    )
    return Generation(
        model=model.card.name,
        token_ids=unpack_token_ids(named),
        submit=submit,
        block_hashes=[],
        bucket=named,
        adapter=model.adapter,
        tenant=tenant_label(caller, model, None),
        caller=caller,
    )


class PassedOutput(RelayedOutput):
    """An answer whose first piece is its content type; empty until that has come."""

    __slots__ = ("content_type",)

    def __init__(self, model: ServedModel) -> None:
        super().__init__(model)
        self.content_type = b""

    def add(self, delta: TokenDelta) -> Sequence[Part]:
        parts = super().add(delta)
        if not self.content_type and parts:
            self.content_type = self.take()
        return parts


class PassedExchange(Exchange):
    """Nothing of our own is written into an answer: one that breaks off is cut."""

    async def _beat(self) -> None:
        """A server's silence is passed on as well."""

    def _stream_headers(self) -> Sequence[Header]:
        (output,) = self._request.prompts[0].outputs
        assert isinstance(output, PassedOutput)
        return [(b"content-type", output.content_type)]

    def _read(self, prompt: Prompt, run: Runs, usage: PromptUsage) -> None:
        prompt.usage = usage
        prompt.decided(run)

    async def fail(self, error: HttpError, *, extra: Sequence[Header] = ()) -> None:
        if not self._is_streaming:
            await super().fail(error, extra=extra)
            return
        self._request.status = error.status
        if self._connection is not None:
            self._connection.give_up()
