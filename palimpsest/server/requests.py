"""What clients may ask, checked field by field, as requests of the engine. What is not supported is refused, not ignored."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from palimpsest import calls
from palimpsest.config import InputError, SamplingConfig
from palimpsest.engine import Constraint, Engine, Request
from palimpsest.generate import prompt_ids
from palimpsest.messages import message_ids, stop_texts
from palimpsest.server import grammar
from palimpsest.tokenizer import Tokenizer

MOST_PROMPTS = 64  # of one request
MOST_STOPS = 4


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)


class StreamOptions(_Body):
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class _Common(_Body):
    model: str
    n: Annotated[int, Field(ge=1, le=64)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None  # beyond OpenAI's
    stop: str | list[str] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None

    def reader(self, tokenizer: Tokenizer) -> calls.Reader:
        """What reads one answer."""
        return calls.Reader()

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def _request(
        self,
        engine: Engine,
        prompt: list[int],
        most_tokens: int | None,
        top_logprobs: int | None,
        stop: tuple[str, ...] = (),
        constraint: Callable[[], Constraint] | None = None,
    ) -> Request:
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if len(stops) > MOST_STOPS:
            raise InputError(f"stop holds {len(stops)} texts; give at most {MOST_STOPS}")
        if self.stream_options is not None and not self.stream:
            raise InputError("stream_options is for streams; set stream to true or leave it out")
        default = 16 if isinstance(self, CompletionBody) else engine.context_tokens or 2048
        config = SamplingConfig(
            max_new_tokens=default if most_tokens is None else most_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=self.top_k or 0,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=None if self.seed is None else self.seed % 2**63,
            stop=stops + stop,
        )
        penalties = self.frequency_penalty or 0.0, self.presence_penalty or 0.0
        request = Request(tuple(prompt), config, self.n or 1, *penalties, self._bias(), top_logprobs, constraint)
        engine.check(request)
        return request

    def _bias(self) -> dict[int, float]:
        bias = {}
        for token, value in (self.logit_bias or {}).items():
            if not token.isascii() or not token.isdecimal():
                raise InputError(f"logit_bias names {token!r}; its keys are token ids")
            bias[int(token)] = value
        return bias


class CompletionBody(_Common):
    """POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]] = ""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: Literal[False] | None = None
    best_of: None = None
    suffix: None = None

    def requests(self, engine: Engine) -> list[Request]:
        """One per prompt."""
        prompts: list[Any] = self.prompt if isinstance(self.prompt, list) else [self.prompt]
        if prompts and isinstance(prompts[0], int):
            prompts = [prompts]
        if not 1 <= len(prompts) <= MOST_PROMPTS:
            raise InputError(f"prompt holds {len(prompts)} prompts; give 1 to {MOST_PROMPTS}")
        made = []
        for prompt in prompts:
            ids = prompt_ids(engine.model, engine.tokenizer, prompt) if isinstance(prompt, str) else prompt
            made.append(self._request(engine, ids, self.max_tokens, self.logprobs))
        return made


class TextPart(_Body):
    type: Literal["text"]
    text: str


class Message(_Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None  # beyond OpenAI's: thoughts, as replies have them
    refusal: None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    def plain(self) -> dict[str, Any]:
        """As templates take it: content as one text, arguments of calls as objects, nothing that was left out."""
        message = self.model_dump(exclude_none=True)
        content = self.content
        message["content"] = content if isinstance(content, str) else "".join(part.text for part in content or ())
        message["role"] = "system" if self.role == "developer" else self.role
        for call in message.get("tool_calls", ()):
            function = call.get("function")
            if isinstance(function, dict) and isinstance(function.get("arguments"), str):
                function["arguments"] = _object(function["arguments"])
        return message


def _object(arguments: str) -> dict[str, Any]:
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InputError(f"the arguments of a call are {arguments[:40]!r}; they must be the text of a JSON object")
    return value


class JsonSchema(_Body):
    name: str
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(_Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatBody(_Common):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] | None = None

    def requests(self, engine: Engine) -> list[Request]:
        """The one request."""
        if self.top_logprobs is not None and not self.logprobs:
            raise InputError("top_logprobs is given without logprobs; set logprobs to true")
        constraint = self._constraint(engine)
        messages = [message.plain() for message in self.messages]
        ids = message_ids(engine.tokenizer, messages, self._tools, thinking=constraint is None)
        most = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        top = (self.top_logprobs or 0) if self.logprobs else None
        return [self._request(engine, ids, most, top, stop_texts(engine.tokenizer), constraint)]

    def reader(self, tokenizer: Tokenizer) -> calls.Reader:
        return calls.reader(tokenizer, bool(self._tools), thinking=not self._constrained)

    @property
    def _tools(self) -> list[dict[str, Any]] | None:
        return None if self.tool_choice == "none" else self.tools

    @property
    def _constrained(self) -> bool:
        return self.response_format is not None and self.response_format.type != "text"

    def _constraint(self, engine: Engine) -> Callable[[], Constraint] | None:
        wanted = self.response_format
        if wanted is None or not self._constrained:
            return None
        if wanted.type == "json_object":
            return grammar.json_schema(engine.tokenizer, {"type": "object"})
        if wanted.json_schema is None:
            raise InputError("response_format is json_schema without one; give json_schema.schema")
        return grammar.json_schema(engine.tokenizer, wanted.json_schema.schema_ or {"type": "object"})
