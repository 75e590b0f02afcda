"""Text from a model: prompts are read in one packed pass, then every row draws one token a step from its state.

Rows do not disturb one another: each has its own random generator, its own decoder and its own end, and a row that has
ended is dropped from the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Literal, Self

import torch
from torch import Tensor

from palimpsest.config import InputError, SamplingConfig
from palimpsest.model import Model
from palimpsest.tokenizer import Tokenizer

LIKELIEST = 1024  # tokens that are sorted first for top_p

FinishReason = Literal["stop", "length"]


class Completion(str):
    """The text that followed a prompt; a `str` with what it was made of.

    `token_ids` are the drawn tokens without the end token; with a stop text they include the tokens that spelled it.
    `finish_reason` is "stop" (an end token or stop text) or "length" (`max_new_tokens`, or the position table is full).
    """

    token_ids: tuple[int, ...]
    finish_reason: FinishReason

    def __new__(cls, text: str, token_ids: Sequence[int], finish_reason: FinishReason) -> Self:
        completion = super().__new__(cls, text)
        completion.token_ids = tuple(token_ids)
        completion.finish_reason = finish_reason
        return completion

    def __getnewargs__(self) -> tuple[str, tuple[int, ...], FinishReason]:  # type: ignore[override]
        return str(self), self.token_ids, self.finish_reason

    @property
    def text(self) -> str:
        """The same text as a plain `str`."""
        return str(self)


def generate(
    model: Model, tokenizer: Tokenizer, prompts: Sequence[str | Sequence[int]], config: SamplingConfig
) -> list[Completion]:
    """One completion per prompt, a text or token ids, each the same whatever its neighbours (in float32).

    With a seed every row starts its own generator from it, so equal prompts give equal texts. An empty prompt starts from
    the tokenizer's end token. A learned position table bounds prompt and text together. Raises InputError, before any
    work, for a prompt that does not fit, an empty prompt without an end token, or a tokenizer of another vocabulary.
    """
    if isinstance(prompts, str):
        raise InputError(f"prompts is the text {prompts[:20]!r}; it must be a list of texts")
    rows = [Row(model, tokenizer, prompt_ids(model, tokenizer, prompt), config) for prompt in prompts]
    texts = [""] * len(rows)
    for pieces in _steps(model, rows, config):
        for index, piece in pieces:
            texts[index] += piece
    return [Completion(text, row.token_ids, row.finish_reason or "length") for text, row in zip(texts, rows, strict=True)]


def stream(model: Model, tokenizer: Tokenizer, prompt: str, config: SamplingConfig) -> Iterator[str]:
    """The text of `generate` for one prompt in pieces, each given out as soon as no stop text can still begin in it.

    Mistakes are raised by the call itself, not by the first piece.
    """
    row = Row(model, tokenizer, prompt_ids(model, tokenizer, prompt), config)
    return (piece for pieces in _steps(model, [row], config) for _, piece in pieces if piece)


class Row:
    """One sequence while it is drawn: its tokens, its randomness, and the text that is held back."""

    def __init__(self, model: Model, tokenizer: Tokenizer, prompt_ids: list[int], config: SamplingConfig) -> None:
        self.end_ids = tokenizer.end_ids
        self.prompt_ids = prompt_ids
        self.token_ids: list[int] = []
        self.decoded = 0  # characters of the tokens so far, shown or held back
        self.room = config.max_new_tokens
        if model.config.position == "learned":
            self.room = min(self.room, model.config.max_position_embeddings - len(self.prompt_ids))
        self.finish_reason: FinishReason | None = None if self.room else "length"
        self.generator = torch.Generator()
        if config.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(config.seed)
        # A model may have more tokens than its tokenizer (a padded table); those beyond have no text and are never drawn.
        self.vocab_size = tokenizer.vocab_size
        self._decoder = tokenizer.decode_stream()
        self._stop = StopText(config.stop)

    def take(self, token: int) -> str:
        """Adds a drawn token; returns the text that may now be shown."""
        if token in self.end_ids:
            return self.finish("stop")
        self.token_ids.append(token)
        text = self._decoder.push(token)
        self.decoded += len(text)
        shown = self._stop.push(text)
        if self._stop.found:
            self.finish_reason = "stop"
        elif len(self.token_ids) == self.room:
            shown += self.finish("length")
        return shown

    @property
    def stopped(self) -> bool:
        """A stop text was found."""
        return self._stop.found

    def finish(self, reason: FinishReason) -> str:
        """Ends the text; returns what was held back."""
        # A character that was cut off in the middle would decode to U+FFFD; it is left out.
        shown = self._stop.push(self._decoder.flush().rstrip("\N{REPLACEMENT CHARACTER}"))
        self.finish_reason = "stop" if self._stop.found else reason
        return shown + self._stop.flush()


class StopText:
    """Lets text through up to the first stop text, holding back any ending that could be the beginning of one."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.stops = stops
        self.found = False
        self._held = ""

    def push(self, text: str) -> str:
        """Text that surely comes before every stop text. Where two overlap, the one that is complete first ends the text."""
        self._held += text
        ends = [(start + len(stop), start) for stop in self.stops if (start := self._held.find(stop)) >= 0]
        if ends:
            self.found = True
            shown, self._held = self._held[: min(ends)[1]], ""
            return shown
        hold = max((overlap(self._held, stop) for stop in self.stops), default=0)
        shown, self._held = self._held[: len(self._held) - hold], self._held[len(self._held) - hold :]
        return shown

    def flush(self) -> str:
        """What was held back, once nothing can follow."""
        shown, self._held = self._held, ""
        return shown


def overlap(text: str, stop: str) -> int:
    """The length of the longest ending of `text` that begins `stop` without completing it."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


def prompt_ids(model: Model, tokenizer: Tokenizer, prompt: str | Sequence[int]) -> list[int]:
    """The ids of a prompt that fits the model; InputError for one that does not. An empty one is the end token."""
    vocabulary, limit = model.config.vocab_size, model.config.max_position_embeddings
    if tokenizer.vocab_size > vocabulary:
        raise InputError(
            f"the tokenizer has {tokenizer.vocab_size} tokens and the model's vocab_size is {vocabulary}; "
            "use the tokenizer that the model was trained with"
        )
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
    if not ids:
        if tokenizer.eos_id is None:
            raise InputError("the prompt is empty and the tokenizer has no end token to start from; give some text")
        ids = [tokenizer.eos_id]
    if model.config.position == "learned" and len(ids) > limit:
        raise InputError(f"the prompt has {len(ids)} tokens and the model's position table {limit}; shorten the prompt")
    return list(ids)


@torch.inference_mode()
def _steps(model: Model, rows: list[Row], config: SamplingConfig) -> Iterator[list[tuple[int, str]]]:
    """Draws until every row has ended. Each step gives (row, shown text) for the rows that still took part."""
    active = [index for index, row in enumerate(rows) if row.finish_reason is None]
    if not active:
        return
    device = model.embed_tokens.weight.device
    prompts = [rows[index].prompt_ids for index in active]
    bounds = torch.tensor([0, *accumulate(map(len, prompts))], device=device)
    ids = torch.tensor([[token for prompt in prompts for token in prompt]], device=device)
    hidden, state = model.hidden(ids, cu_seqlens=bounds)
    last = hidden[0, bounds[1:] - 1]
    while True:
        logits = model.logits(last).cpu()
        drawn = [
            draw(scores[: rows[index].vocab_size], config, rows[index].generator)
            for index, scores in zip(active, logits, strict=True)
        ]
        yield [(index, rows[index].take(token)) for index, token in zip(active, drawn, strict=True)]
        kept = [n for n, index in enumerate(active) if rows[index].finish_reason is None]
        if not kept:
            return
        if len(kept) < len(active):
            state, active, drawn = state.select(kept), [active[n] for n in kept], [drawn[n] for n in kept]
        hidden, state = model.hidden(torch.tensor(drawn, device=device).unsqueeze(1), state)
        last = hidden[:, 0]


def draw(logits: Tensor, config: SamplingConfig, generator: torch.Generator) -> int:
    """A token from logits [vocab] on the CPU. In float64, so that the draw does not depend on the model's dtype."""
    best = logits.max()
    if not best.isfinite():
        raise InputError(f"the model's logits reach {best.item()}; its weights are damaged or its training diverged")
    if config.temperature == 0:
        return int(logits.argmax())
    weights = ((logits.double() - best) / config.temperature).exp()
    order = None
    if config.top_k or config.top_p < 1:
        weights, order = _likeliest(weights, config.top_k, config.top_p)
    mass = weights.cumsum(0)
    point = torch.rand((), dtype=torch.float64, generator=generator) * mass[-1]
    chosen = min(int(torch.searchsorted(mass, point, right=True)), int(weights.nonzero()[-1]))
    return chosen if order is None else int(order[chosen])


def _likeliest(weights: Tensor, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """The weights that `top_k` and `top_p` leave of weights [vocab], greatest first, equal ones by token; and their tokens.

    They are the beginning of a stable sort of all, of which mostly a short part is needed: that of some greatest weights,
    and of all that equal the least of them. Where these do not hold `top_p` of the mass, all are sorted.
    """
    most = min(top_k or LIKELIEST, len(weights))
    least = weights.topk(most, sorted=False).values.min()
    tokens = (weights >= least).nonzero().squeeze(1)
    first, order = weights[tokens].sort(descending=True, stable=True)
    order = tokens[order]
    if top_k:
        first, order = first[:top_k], order[:top_k]
    total = first.sum() if top_k else weights.sum()
    mass = first.cumsum(0)
    if not top_k and mass[-1] < top_p * total:
        first, order = weights.sort(descending=True, stable=True)
        mass = first.cumsum(0)
    # Keeps a token while those before it have not reached top_p: the first always, and the one that reaches it.
    kept = 1 + int((mass[:-1] < top_p * total).sum())
    return first[:kept], order[:kept]
