"""What is refused before any route: foreign origins and hosts, wrong keys; and bodies that are too large or too slow."""

from __future__ import annotations

import asyncio
import hmac
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from palimpsest.server.metrics import Metrics

BODY_SECONDS = 30.0  # that a client may take to send its request
MOST_HEADER_BYTES = 32 << 10
OPEN_PATHS = ("/", "/health")  # without a key
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


class Refusal(Exception):
    """An answer in OpenAI's error form."""

    def __init__(self, status: int, message: str, *, kind: str = "invalid_request_error", param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.kind, self.param = status, kind, param
        self.code: str | None = None
        self.headers: dict[str, str] = {}

    def response(self) -> JSONResponse:
        return JSONResponse(self.content(), self.status, self.headers)

    def content(self) -> dict[str, object]:
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


class Guard:
    """ASGI middleware.

    A browser shows its page's origin: pages of other sites are refused, so that a visit elsewhere cannot use a server on
    this machine; with `local_only` the name the client asked for must be this machine's own, which stops names that were
    pointed here.
    """

    def __init__(self, app: ASGIApp, api_key: str | None, local_only: bool, metrics: Metrics) -> None:
        self.app, self.local_only, self.metrics = app, local_only, metrics
        self.key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.metrics.statuses[message["status"]] += 1
            await send(message)

        refusal = self._refusal(Request(scope))
        await (self.app if refusal is None else refusal.response())(scope, receive, counted)

    def _refusal(self, request: Request) -> Refusal | None:
        if sum(len(name) + len(value) for name, value in request.scope["headers"]) > MOST_HEADER_BYTES:
            return Refusal(431, f"the headers are larger than {MOST_HEADER_BYTES} bytes; send less")
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if self.local_only and urlsplit(f"//{host}").hostname not in LOCAL_NAMES:
            return Refusal(403, f"host is {host!r}; this server answers to {', '.join(LOCAL_NAMES)}")
        if origin is not None and urlsplit(origin).netloc != host:
            return Refusal(403, f"origin is {origin!r}; pages of other sites are not served")
        if self.key is None or request.url.path in OPEN_PATHS:
            return None
        given = request.headers.get("authorization", "").encode("latin-1")
        if hmac.compare_digest(given, b"Bearer " + self.key):
            return None
        refusal = Refusal(
            401, "the API key is missing or wrong; send it as Authorization: Bearer KEY", kind="authentication_error"
        )
        refusal.code = "invalid_api_key"
        return refusal


async def read_body(request: Request, most_bytes: int) -> bytes:
    """The body of a JSON request; a Refusal when it is something else, too large or too slow."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refusal(415, f"content-type is {kind!r}; send application/json")
    too_large = Refusal(413, f"the body is larger than {most_bytes} bytes; send less")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > most_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > most_bytes:
                    raise too_large
    except TimeoutError:
        raise Refusal(408, f"the body took longer than {BODY_SECONDS:g} s") from None
    return bytes(body)
