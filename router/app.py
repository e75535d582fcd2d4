"""The router's ASGI application: its routes, and errors of the control routes.

Owns the routes of clients, and those of operators, who may have a listener of their own. The routes that
generate bypass Starlette: they are raw endpoints and write by themselves.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.api.access import admin_access
from router.api.anthropic.routes import AnthropicRoutes
from router.api.api_request import ApiRequest, Prepare
from router.api.authenticator import Authenticator
from router.api.chats import prepare_chats
from router.api.context import ApiContext
from router.api.control import ControlRoutes
from router.api.cross_origin import CrossOrigin
from router.api.dialects import DIALECTS, vendor_of
from router.api.gemini.answers import read_path
from router.api.gemini.models import GeminiRoutes
from router.api.gemini.paths import COUNT, GENERATE_CONTENT, MODELS_PATHS, model_method
from router.api.openai.completions import prepare_completion
from router.api.passed import PassedExchange, passed_endpoints, prepare_passed
from router.api.previews import PreviewRoutes
from router.api.request_guard import RequestGuard
from router.api.serving import GenerationEndpoint
from router.edge.http import ClientGone, client_request_id
from router.edge.http_error import INTERNAL_ERROR, HttpError, http_error, method_not_allowed, unknown_route
from router.errors import RouterError
from router.openapi.routes import docs_routes


@dataclass(frozen=True, slots=True)
class Apps:
    """The app of each listener; `main` serves everything if `admin` is None."""

    main: ASGIApp
    admin: ASGIApp | None


REQUEST_ID = "kvasir.request_id"
"""Scope key of the request id, on routes that generate nothing."""


async def prepare_content(context: ApiContext, asked: ApiRequest) -> None:
    """Prepare a request whose path names model and method."""
    read_path(asked)
    await prepare_chats("gemini")(context, asked)


PREPARES: Mapping[str, Prepare] = {
    **{dialect.path: prepare_chats(kind) for kind, dialect in DIALECTS.items()},
    "/v1/completions": prepare_completion,
    GENERATE_CONTENT: prepare_content,
}
"""Preparation by path. A feature may replace it. Gemini's paths include the model."""


def client_routes(context: ApiContext) -> list[Route]:
    """All but the raw ones."""
    return [
        *GeminiRoutes(context).routes(),
        *AnthropicRoutes(context).routes(),
        *ControlRoutes(context).routes(),
        *docs_routes(lambda: tuple(context.catalog.routes())),
        *(route for feature in context.features for route in feature.client_routes()),
    ]


def create_apps(context: ApiContext) -> Apps:
    prepares = dict(PREPARES)
    for feature in context.features:
        prepares |= feature.preparers()
    access = admin_access(context.config)
    plain = ControlRoutes(context)
    admin = [*plain.metrics_routes(), *PreviewRoutes(context, access, prepares).routes()]
    for feature in context.features:
        admin += feature.operator_routes()
    hot = {
        path: GenerationEndpoint(context, path.removeprefix("/v1/").replace("/", "_"), prepare)
        for path, prepare in prepares.items()
        if path != GENERATE_CONTENT
    }
    generate_content = GenerationEndpoint(context, "generate_content", prepares[GENERATE_CONTENT])
    passed = passed_endpoints(context, prepare_passed, PassedExchange)

    def endpoint_of(path: str) -> ASGIApp | None:
        endpoint = hot.get(path)
        if endpoint is not None:
            return endpoint
        asked = model_method(path) if path.startswith(MODELS_PATHS) else None
        return passed(path) if asked is None or asked.method == COUNT else generate_content

    config = context.config
    common, index = plain.health_routes(), plain.index_routes()
    clients = client_routes(context)
    if not config.has_admin_listener:
        everything = [*common, *clients, *admin, *index]
        return Apps(_listener(context, everything, endpoint_of, config.host), None)
    main = _listener(context, [*common, *clients, *index], endpoint_of, config.host)
    admin_host = None if config.admin_port is None else config.admin_host
    return Apps(main, _listener(context, [*common, *admin], lambda path: None, admin_host, has_keys=False))


def create_gateway_app(context: ApiContext, endpoint_of: Callable[[str], ASGIApp | None]) -> ASGIApp:
    """Return the app of requests at a gateway. Those that generate are `endpoint_of`'s, the others are
    answered here as the clients' listener answers them."""
    routes = [*ControlRoutes(context).health_routes(), *client_routes(context)]
    return _listener(context, routes, endpoint_of, None)


def _authenticated(context: ApiContext, app: ASGIApp) -> ASGIApp:
    keys = context.keys
    if keys is None:
        return app
    open_routes = [*ControlRoutes(context).health_routes(), *docs_routes()]
    return Authenticator(
        app,
        keys=keys,
        open_paths=frozenset(("/", *(route.path for route in open_routes))),
        count=context.metrics.count_refusal,
        new_id=context.new_id,
        clock=context.wall_clock,
    )


def _listener(
    context: ApiContext,
    routes: Sequence[Route],
    endpoint_of: Callable[[str], ASGIApp | None],
    host: str | None,
    *,
    has_keys: bool = True,
) -> ASGIApp:
    """Everything of one listener, behind its guards."""
    app = _app(routes, endpoint_of, context.new_id)

    def is_route(scope: Scope) -> bool:
        if endpoint_of(scope["path"]) is not None:
            return True
        return any(route.matches(scope)[0] is not Match.NONE for route in routes)

    return RequestGuard(
        _authenticated(context, app) if has_keys else app,
        is_route=is_route,
        host=host,
        allowed_hosts=context.config.allowed_hosts,
        cross_origin=CrossOrigin(context.config.cors_origins),
        count=context.metrics.count_refusal,
        new_id=context.new_id,
    )


def _app(
    routes: Sequence[Route],
    endpoint_of: Callable[[str], ASGIApp | None],
    new_id: Callable[[str], str],
) -> ASGIApp:
    """`endpoint_of` knows the raw ones by their path."""
    control = Starlette(
        routes=routes,
        exception_handlers={
            RouterError: _on_router_error,
            HTTPException: _on_http_exception,
            ClientGone: _on_client_gone,
            Exception: _on_any_error,
        },
    )

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = endpoint_of(scope["path"]) if scope["type"] == "http" else None
        if endpoint is not None:
            await endpoint(scope, receive, send)
        else:
            await control(scope, receive, with_request_id(scope, send, new_id))

    return app


async def _on_router_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RouterError)
    return _response(request, http_error(error))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    is_of_model = request.method == "POST" and path.startswith(MODELS_PATHS)  # with a method that is none
    if error.status_code == 404 or is_of_model:
        return _response(request, unknown_route(request.method, path))
    if error.status_code == 405:
        response = _response(request, method_not_allowed(request.method, path))
        response.headers.update(error.headers or {})
        return response
    return _response(request, HttpError(error.status_code, error.detail, "invalid_request_error"))


async def _on_client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=400)  # the client has left


async def _on_any_error(request: Request, error: Exception) -> Response:
    return _response(request, INTERNAL_ERROR)


def _response(request: Request, error: HttpError) -> Response:
    errors = vendor_of(request.scope).errors
    response = Response(errors.body(error, request.scope.get(REQUEST_ID)), errors.status(error))
    for name, value in error.headers():
        response.headers[name.decode()] = value.decode()
    return response


def with_request_id(scope: Scope, send: Send, new_id: Callable[[str], str]) -> Send:
    """Sends an answer with the request's id, as those have it that generate. The scope has it, too."""
    if scope["type"] != "http":
        return send
    request_id = client_request_id(scope) or new_id("req_")
    scope[REQUEST_ID] = request_id
    headers = [(name, request_id.encode()) for name in vendor_of(scope).errors.request_id_headers]

    async def send_named(message: Message) -> None:
        if message["type"] == "http.response.start":
            have = {name.lower() for name, _ in message["headers"]}
            missing = [header for header in headers if header[0] not in have]
            message = {**message, "headers": [*message["headers"], *missing]}
        await send(message)

    return send_named
