"""What clients are answered: the types of the `openai` package, whole or in pieces."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from openai.types import Completion, CompletionChoice, CompletionUsage
from openai.types.chat import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionMessage,
    ChatCompletionMessageFunctionToolCall,
    ChatCompletionTokenLogprob,
)
from openai.types.chat import chat_completion as whole_chat
from openai.types.chat import chat_completion_chunk as chunk_chat
from openai.types.chat.chat_completion_message_function_tool_call import Function
from openai.types.chat.chat_completion_token_logprob import TopLogprob
from openai.types.completion_choice import Logprobs
from openai.types.completion_usage import PromptTokensDetails
from pydantic import BaseModel

from palimpsest.calls import Call, Reader, Said
from palimpsest.engine import Piece, Ticket, TokenScore
from palimpsest.tokenizer import Tokenizer

LOWEST = -9999.0  # stands for minus infinity, which JSON lacks
Ended = Literal["stop", "length", "tool_calls"]


@dataclass
class Choice:
    """What one answer has said so far."""

    reader: Reader
    text: str = ""
    thought: str = ""
    calls: list[Call] = field(default_factory=list)
    scores: list[TokenScore] = field(default_factory=list)
    finish_reason: Ended | None = None
    offset: int = 0  # characters of the scored tokens

    def add(self, piece: Piece) -> Said:
        """Takes what the answer has gained; returns what that says."""
        said = self.reader.push(piece.text)
        if piece.finish_reason is not None:
            rest = self.reader.finish()
            said = Said(said.content + rest.content, said.thought + rest.thought, said.calls + rest.calls)
        self.text += said.content
        self.thought += said.thought
        self.calls += said.calls
        self.scores += piece.scores
        called = self.calls and piece.finish_reason == "stop"
        self.finish_reason = "tool_calls" if called else cast(Ended | None, piece.finish_reason)
        return said


class Replies:
    """The replies to one HTTP request; subclasses know the two forms."""

    prefix = ""

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer,
        tickets: Sequence[Ticket],
        logprobs: bool,
        reader: Callable[[], Reader] = Reader,
    ) -> None:
        self.id, self.created, self.model = f"{self.prefix}{uuid.uuid4().hex}", int(time.time()), model
        self.tokenizer, self.tickets, self.logprobs = tokenizer, tickets, logprobs
        self.choices = [Choice(reader()) for ticket in tickets for _ in ticket.answers]

    def usage(self) -> CompletionUsage:
        prompt = sum(len(ticket.request.prompt) for ticket in self.tickets)
        completion = sum(ticket.completion_tokens for ticket in self.tickets)
        cached = PromptTokensDetails(cached_tokens=sum(ticket.cached_tokens for ticket in self.tickets))
        return CompletionUsage(
            prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion, prompt_tokens_details=cached
        )

    def opening(self) -> list[BaseModel]:
        """Chunks before any text."""
        return []

    def chunk(self, index: int, piece: Piece) -> BaseModel | None:
        """None for a piece that says nothing yet."""
        raise NotImplementedError

    def usage_chunk(self) -> BaseModel:
        raise NotImplementedError

    def whole(self) -> BaseModel:
        raise NotImplementedError

    def _text(self, token: int) -> str:
        return self.tokenizer.decode([token])

    def _head(self) -> dict[str, Any]:
        return {"id": self.id, "created": self.created, "model": self.model}


class ChatReplies(Replies):
    prefix = "chatcmpl-"

    def opening(self) -> list[BaseModel]:
        return [
            self._chunk([self._delta(index, chunk_chat.ChoiceDelta(role="assistant", content=""))])
            for index in range(len(self.choices))
        ]

    def chunk(self, index: int, piece: Piece) -> BaseModel | None:
        choice = self.choices[index]
        said = choice.add(piece)
        delta: dict[str, Any] = {}
        if said.thought:
            delta["reasoning_content"] = said.thought
        if said.content or (self.logprobs and piece.scores):
            delta["content"] = said.content
        if said.calls:
            first = len(choice.calls) - len(said.calls)
            delta["tool_calls"] = [_called(number, call) for number, call in enumerate(said.calls, first)]
        if not delta and choice.finish_reason is None:
            return None
        return self._chunk([self._delta(index, chunk_chat.ChoiceDelta(**delta), piece)])

    def usage_chunk(self) -> BaseModel:
        return self._chunk([], self.usage())

    def whole(self) -> BaseModel:
        choices = []
        for index, choice in enumerate(self.choices):
            beside: dict[str, Any] = {"reasoning_content": choice.thought} if choice.thought else {}
            if choice.calls:
                beside["tool_calls"] = [
                    ChatCompletionMessageFunctionToolCall(id=call.id, type="function", function=_function(call))
                    for call in choice.calls
                ]
            content = None if choice.calls and not choice.text else choice.text
            message = ChatCompletionMessage(role="assistant", content=content, refusal=None, **beside)
            scores = whole_chat.ChoiceLogprobs(content=self._scores(choice.scores)) if self.logprobs else None
            reason = choice.finish_reason or "stop"
            choices.append(whole_chat.Choice(index=index, message=message, finish_reason=reason, logprobs=scores))
        return ChatCompletion(object="chat.completion", choices=choices, usage=self.usage(), **self._head())

    def _chunk(self, choices: list[chunk_chat.Choice], usage: CompletionUsage | None = None) -> ChatCompletionChunk:
        return ChatCompletionChunk(object="chat.completion.chunk", choices=choices, usage=usage, **self._head())

    def _delta(self, index: int, delta: chunk_chat.ChoiceDelta, piece: Piece | None = None) -> chunk_chat.Choice:
        scores = None
        if self.logprobs and piece is not None and piece.scores:
            scores = chunk_chat.ChoiceLogprobs(content=self._scores(piece.scores))
        reason = None if piece is None else self.choices[index].finish_reason
        return chunk_chat.Choice(index=index, delta=delta, finish_reason=reason, logprobs=scores)

    def _scores(self, scores: Sequence[TokenScore]) -> list[ChatCompletionTokenLogprob]:
        found = []
        for score in scores:
            top = [
                TopLogprob(token=self._text(token), bytes=self._bytes(token), logprob=max(value, LOWEST))
                for token, value in score.top
            ]
            token, value = score.token, max(score.logprob, LOWEST)
            found.append(
                ChatCompletionTokenLogprob(token=self._text(token), bytes=self._bytes(token), logprob=value, top_logprobs=top)
            )
        return found

    def _bytes(self, token: int) -> list[int]:
        """A part of a character has no text of its own; its bytes say which."""
        table = self.tokenizer._bytes_of_ids
        return list(self._text(token).encode() if table is None else table.get(token, b""))


def _function(call: Call) -> Function:
    return Function(name=call.name, arguments=call.arguments)


def _called(number: int, call: Call) -> chunk_chat.ChoiceDeltaToolCall:
    """A call is whole when it is given out."""
    function = chunk_chat.ChoiceDeltaToolCallFunction(name=call.name, arguments=call.arguments)
    return chunk_chat.ChoiceDeltaToolCall(index=number, id=call.id, type="function", function=function)


class CompletionReplies(Replies):
    prefix = "cmpl-"

    def chunk(self, index: int, piece: Piece) -> BaseModel:
        scores = self._scores(self.choices[index], piece.scores) if self.logprobs and piece.scores else None
        # The types ask for a reason that a chunk does not have yet; the interface sends null.
        choice = CompletionChoice.model_construct(
            index=index, text=piece.text, finish_reason=piece.finish_reason, logprobs=scores
        )
        return self._reply([choice])

    def usage_chunk(self) -> BaseModel:
        return self._reply([], self.usage())

    def whole(self) -> BaseModel:
        choices = []
        for index, choice in enumerate(self.choices):
            scores = self._scores(choice, choice.scores) if self.logprobs else None
            reason = cast(Literal["stop", "length"], choice.finish_reason or "stop")
            choices.append(CompletionChoice(index=index, text=choice.text, finish_reason=reason, logprobs=scores))
        return self._reply(choices, self.usage())

    def _reply(self, choices: list[CompletionChoice], usage: CompletionUsage | None = None) -> Completion:
        return Completion.model_construct(object="text_completion", choices=choices, usage=usage, **self._head())

    def _scores(self, choice: Choice, scores: Sequence[TokenScore]) -> Logprobs:
        tokens = [self._text(score.token) for score in scores]
        offsets = []
        for token in tokens:
            offsets.append(choice.offset)
            choice.offset += len(token)
        values = [max(score.logprob, LOWEST) for score in scores]
        tops = [{self._text(token): max(value, LOWEST) for token, value in reversed(score.top)} for score in scores]
        return Logprobs(tokens=tokens, text_offset=offsets, token_logprobs=values, top_logprobs=tops)
