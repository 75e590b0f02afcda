"""Routes: OpenAI's completions and chat, models, health, metrics, and the chat page."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, TypeVar

from fastapi import FastAPI
from openai.types import Model
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from palimpsest import engine as engines
from palimpsest.config import InputError
from palimpsest.engine import ContextExceeded, Piece, Ticket, Worker
from palimpsest.server.limits import Guard, Refusal, read_body
from palimpsest.server.metrics import Metrics
from palimpsest.server.replies import ChatReplies, CompletionReplies, Replies
from palimpsest.server.requests import ChatBody, CompletionBody

log = logging.getLogger("palimpsest.server")
Body = TypeVar("Body", ChatBody, CompletionBody)
PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"


@dataclass(frozen=True)
class Settings:
    """How the server meets its clients."""

    model_name: str
    api_key: str | None = None
    most_queued: int = 256  # requests that wait; beyond it 429
    most_body_bytes: int = 4 << 20
    local_only: bool = True  # it is bound to this machine's own address


class Call:
    """One HTTP request in the engine: its tickets, and a queue of what they say."""

    def __init__(self, worker: Worker, requests: list[engines.Request], metrics: Metrics, arrived: float) -> None:
        self._worker, self._metrics, self._arrived = worker, metrics, arrived
        self._loop, self._queue = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Piece]]()
        self.tickets: list[Ticket] = []
        first = 0
        for request in requests:
            self.tickets.append(worker.submit(request, self._into_queue(first)))
            first += request.n
        self._open = first

    def _into_queue(self, first: int) -> Any:
        def deliver(piece: Piece) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody listens
                self._loop.call_soon_threadsafe(self._queue.put_nowait, (first + piece.index, piece))

        return deliver

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """(choice, piece) until all have ended. A failed answer raises Refusal."""
        heard = False
        while self._open:
            index, piece = await self._queue.get()
            if not heard:
                heard = True
                self._metrics.first_token(time.perf_counter() - self._arrived)
            if piece.finish_reason in ("failed", "cancelled"):
                raise Refusal(500, piece.error or "the request was cancelled", kind="server_error")
            self._open -= piece.finish_reason is not None
            yield index, piece

    def cancel(self) -> None:
        for ticket in self.tickets:
            if not ticket.done:
                self._worker.cancel(ticket)


class Events(StreamingResponse):
    """Server-sent events; whatever ends the stream, the engine stops working for it."""

    def __init__(self, call: Call, content: AsyncIterator[bytes], ended: Callable[[], Any]) -> None:
        super().__init__(content, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._call, self._ended = call, ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._call.cancel()
            self._ended()


class Service:
    """The routes' work."""

    def __init__(self, worker: Worker, settings: Settings) -> None:
        self.worker, self.engine, self.settings = worker, worker.engine, settings
        self.metrics = Metrics()
        self.started = int(time.time())
        self.calls: dict[str, Call] = {}  # streams that run, by the id of their reply

    def model(self) -> dict[str, Any]:
        made = Model(id=self.settings.model_name, created=self.started, object="model", owned_by="palimpsest")
        return made.model_dump(exclude_unset=True)

    async def answer(self, request: Request, body_type: type[Body], replies_type: type[Replies]) -> Response:
        arrived = time.perf_counter()
        body = body_type.model_validate_json(await read_body(request, self.settings.most_body_bytes))
        self._check_model(body.model)
        if self.engine.queued >= self.settings.most_queued:
            refusal = Refusal(429, f"{self.engine.queued} requests are waiting; try again later", kind="rate_limit_error")
            refusal.headers = {"retry-after": "1"}
            raise refusal
        requests = await asyncio.to_thread(body.requests, self.engine)
        call = Call(self.worker, requests, self.metrics, arrived)
        logprobs = requests[0].top_logprobs is not None
        tokenizer = self.engine.tokenizer
        replies = replies_type(self.settings.model_name, tokenizer, call.tickets, logprobs, lambda: body.reader(tokenizer))
        if body.stream:
            self.calls[replies.id] = call
            return Events(call, self._events(call, replies, body.include_usage), lambda: self.calls.pop(replies.id))
        return await self._whole(request, call, replies)

    def memory(self, name: str) -> dict[str, Any] | None:
        """What the first answer of a running stream holds, and what its layers did with the latest token noted."""
        call = self.calls.get(name)
        if call is None:
            return None
        ticket = call.tickets[0]
        self.engine.watched = ticket
        tokens = len(ticket.answers[0].ids)
        empty = self.engine.model.new_state(1)
        mixers = self.engine.model.config.mixers
        gauges = ticket.gauges or [{}] * len(mixers)
        return {
            "tokens": tokens,
            "prompt_tokens": len(ticket.request.prompt),
            "cached_tokens": ticket.cached_tokens,
            "kv_bytes": tokens * empty.bytes_per_token(),
            "recurrent_bytes": empty.num_bytes("recurrent"),
            "conv_bytes": empty.num_bytes("conv"),
            "layers": [{"mixer": mixer, **gauge} for mixer, gauge in zip(mixers, gauges, strict=True)],
        }

    def _check_model(self, name: str) -> None:
        if name != self.settings.model_name:
            refusal = Refusal(
                404, f"the model {name!r} is not here; this server has {self.settings.model_name!r}", param="model"
            )
            refusal.code = "model_not_found"
            raise refusal

    async def _whole(self, request: Request, call: Call, replies: Replies) -> Response:
        async def collect() -> None:
            async for index, piece in call.pieces():
                replies.choices[index].add(piece)

        async def gone() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass

        work, left = asyncio.create_task(collect()), asyncio.create_task(gone())
        try:
            await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                return Response(status_code=499)  # nobody reads it
            work.result()
        finally:
            work.cancel()
            left.cancel()
            call.cancel()
        return Response(_json(replies.whole()), media_type="application/json")

    async def _events(self, call: Call, replies: Replies, include_usage: bool) -> AsyncIterator[bytes]:
        def event(reply: BaseModel) -> bytes:
            return b"data: " + _json(reply, null_usage=include_usage) + b"\n\n"

        try:
            for reply in replies.opening():
                yield event(reply)
            async for index, piece in call.pieces():
                chunk = replies.chunk(index, piece)
                if chunk is not None:
                    yield event(chunk)
            if include_usage:
                yield event(replies.usage_chunk())
        except Refusal as refusal:
            yield b"data: " + JSONResponse(refusal.content()).body + b"\n\n"
        yield b"data: [DONE]\n\n"


def _json(reply: BaseModel, null_usage: bool = True) -> bytes:
    """Null where the interface has null; fields that were never set are left out."""
    exclude = {"usage"} if not null_usage and getattr(reply, "usage", None) is None else None
    return reply.model_dump_json(exclude_unset=True, exclude=exclude, warnings=False).encode()


def create_app(worker: Worker, settings: Settings) -> FastAPI:
    """The application; its worker ends with it."""
    service = Service(worker, settings)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(worker.close)

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    _add_refusals(app)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await service.answer(request, ChatBody, ChatReplies)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await service.answer(request, CompletionBody, CompletionReplies)

    @app.post("/v1/embeddings")
    async def embeddings() -> Response:
        raise Refusal(400, "this model was trained to continue text, not to embed it; use a model made for embeddings")

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [service.model()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service._check_model(name)
        return service.model()

    @app.get("/memory/{name}")
    async def memory(name: str) -> Response:
        held = service.memory(name)
        return Response(status_code=204) if held is None else JSONResponse(held)

    @app.get("/health")
    async def health() -> Response:
        alive = worker.alive
        return JSONResponse({"status": "ok" if alive else "the engine has ended"}, 200 if alive else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(service.metrics.text(service.engine), media_type="text/plain; version=0.0.4")

    @app.get("/")
    async def page() -> Response:
        html = files("palimpsest.server").joinpath("page.html").read_text(encoding="utf-8")
        return HTMLResponse(html, headers={"content-security-policy": PAGE_POLICY, "x-frame-options": "DENY"})

    app.add_middleware(Guard, settings.api_key, settings.local_only, service.metrics)
    return app


def _add_refusals(app: FastAPI) -> None:
    """Every mistake in OpenAI's error form."""

    @app.exception_handler(Refusal)
    async def refused(_: Request, error: Refusal) -> Response:
        return error.response()

    @app.exception_handler(InputError)
    async def wrong_input(_: Request, error: InputError) -> Response:
        refusal = Refusal(400, str(error))
        refusal.code = "context_length_exceeded" if isinstance(error, ContextExceeded) else None
        return refusal.response()

    @app.exception_handler(ValidationError)
    async def invalid(_: Request, error: ValidationError) -> Response:
        return _invalid(error).response()

    @app.exception_handler(HTTPException)
    async def no_route(request: Request, error: HTTPException) -> Response:
        refusal = Refusal(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
        refusal.headers = dict(error.headers or {})
        return refusal.response()

    @app.exception_handler(ClientDisconnect)
    async def left(_: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> Response:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return Refusal(500, "the server made a mistake; its log says which", kind="server_error").response()


def _invalid(error: ValidationError) -> Refusal:
    """What is wrong with a body; where a value may have several forms, in the form that it comes closest to."""
    first = max(error.errors(include_url=False, include_context=False), key=lambda each: len(each["loc"]))
    forms = ("str", "int", "float")
    place = ".".join(str(part) for part in first["loc"] if part not in forms and "[" not in str(part))
    if first["type"] == "extra_forbidden":
        return Refusal(400, f"{place} is not supported here; leave it out", param=place)
    if first["type"] == "missing":
        return Refusal(400, f"{place} is missing", param=place)
    if first["type"] == "json_invalid":
        return Refusal(400, f"the body is not JSON ({first['msg']})")
    shown = repr(first["input"])
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    return Refusal(400, f"{place or 'the body'} is {shown}; {first['msg'][:1].lower()}{first['msg'][1:]}", param=place or None)
