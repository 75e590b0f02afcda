"""What is asked for, and an answer while it is drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, Protocol

import torch
from torch import Tensor

from palimpsest.config import InputError, SamplingConfig
from palimpsest.engine.drafts import PromptLookup
from palimpsest.engine.prefixes import Node
from palimpsest.generate import Row, draw
from palimpsest.model import Model
from palimpsest.tokenizer import Tokenizer

Reason = Literal["stop", "length", "cancelled", "failed"]


class Constraint(Protocol):
    """What an answer may say next, such as a grammar. One object per answer."""

    def allowed(self) -> Tensor:
        """bool [V]: the tokens that may come next, V at most the vocabulary."""
        ...

    def accept(self, token: int) -> bool:
        """Takes a drawn token; True when the answer is complete."""
        ...


@dataclass(frozen=True)
class Request:
    """`n` answers to one prompt of token ids. Answer i has its own random generator, from `sampling.seed + i`.

    Penalties lower the logits of tokens that the answer holds already, by count and by presence. `top_logprobs` None asks
    for no log-probabilities; 0..20 for those of the drawn token and of that many likeliest.
    """

    prompt: tuple[int, ...]
    sampling: SamplingConfig
    n: int = 1
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    top_logprobs: int | None = None
    constraint: Callable[[], Constraint] | None = None


@dataclass(frozen=True)
class TokenScore:
    """A drawn token, its log-probability in nats under the model, and the likeliest tokens with theirs, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Piece:
    """What answer `index` has gained. Texts joined are the answer; the last piece alone has a reason."""

    index: int
    text: str
    scores: tuple[TokenScore, ...] = ()
    finish_reason: Reason | None = None
    error: str | None = None


class Ticket:
    """A submitted request. `deliver` is called in the engine's thread with every piece."""

    def __init__(self, request: Request, deliver: Callable[[Piece], None]) -> None:
        self.request, self.deliver = request, deliver
        self.answers: list[Answer] = []
        self.cancelled = False  # set from any thread; the next round heeds it
        self.cached_tokens = 0  # of the prompt, not read again
        self.gauges: list[dict[str, float | None]] = []  # of its layers, when somebody watches (gauges.py)

    @property
    def done(self) -> bool:
        return all(answer.reason is not None for answer in self.answers)

    @property
    def completion_tokens(self) -> int:
        """Tokens drawn for all answers, end tokens left out."""
        return sum(len(answer.row.token_ids) for answer in self.answers)


class Answer:
    """One answer: all its ids, the prompt's first; the state it is drawn from lags behind them by at least one."""

    def __init__(self, model: Model, tokenizer: Tokenizer, ticket: Ticket, index: int, room: int, guesses: int) -> None:
        request, config = ticket.request, ticket.request.sampling
        seed = None if config.seed is None else (config.seed + index) % 2**63
        self.ticket, self.request, self.index = ticket, request, index
        self.node: Node | None = None  # up to where its text is in the cache of prefixes
        self.arrival = 0  # its number in the order of admission
        self.row = Row(model, tokenizer, list(request.prompt), config.replace(seed=seed, max_new_tokens=max(room, 1)))
        self.ids = list(request.prompt)
        self.reason: Reason | None = None
        self.lookup = PromptLookup(guesses)
        self.counts: Counter[int] = Counter()
        self.constraint = None if request.constraint is None else request.constraint()
        self._scores: list[tuple[int, TokenScore]] = []  # where the token's text ends, and its score
        self._shown = 0

    @property
    def room(self) -> int:
        """Tokens that may still be drawn."""
        return self.row.room - len(self.row.token_ids)

    def draw(self, logits: Tensor) -> Piece | None:
        """Takes the next token from logits [vocab] on the CPU; returns what can be shown, if anything."""
        logits = logits[: self.row.vocab_size]
        try:
            token = draw(self._adjusted(logits), self.request.sampling, self.row.generator)
            complete = self.constraint is not None and self.constraint.accept(token)
        except (InputError, ValueError, RuntimeError) as error:  # this answer's own: damaged logits, a broken constraint
            return self.end("failed", str(error))
        text = self.row.take(token)
        if token not in self.row.end_ids:
            self.ids.append(token)
            self.counts[token] += 1
            if self.request.top_logprobs is not None:
                self._scores.append((self.row.decoded, _score(logits, token, self.request.top_logprobs)))
        if complete and self.row.finish_reason is None:
            text += self.row.finish("stop")
        self._shown += len(text)
        self.reason = self.row.finish_reason
        # Past a stop text nothing is given out, not even the scores of the tokens that spelled it.
        whole = self.reason is not None and not self.row.stopped
        ready = [score for end, score in self._scores if whole or end <= self._shown]
        self._scores = self._scores[len(ready) :]
        if not text and not ready and self.reason is None:
            return None
        return Piece(self.index, text, tuple(ready), self.reason)

    def end(self, reason: Reason, error: str | None = None) -> Piece:
        self.reason = reason
        return Piece(self.index, "", (), reason, error)

    def _adjusted(self, logits: Tensor) -> Tensor:
        request = self.request
        penalised = self.counts and (request.frequency_penalty or request.presence_penalty)
        if not penalised and not request.logit_bias and self.constraint is None:
            return logits
        logits = logits.clone()
        if penalised:
            tokens = torch.tensor(list(self.counts))
            counts = torch.tensor([float(count) for count in self.counts.values()])
            logits[tokens] -= request.frequency_penalty * counts + request.presence_penalty
        for token, bias in request.logit_bias.items():
            logits[token] += bias
        if self.constraint is not None:
            allowed = self.constraint.allowed()
            logits[: len(allowed)].masked_fill_(~allowed, float("-inf"))
            logits[len(allowed) :] = float("-inf")
        return logits


def _score(logits: Tensor, token: int, top: int) -> TokenScore:
    scores = torch.log_softmax(logits.double(), -1)
    best = scores.topk(min(top, len(scores)))
    likeliest = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return TokenScore(token, float(scores[token]), likeliest)
