"""Our models under lm-eval, the harness with which others measure theirs.

    import lm_eval, palimpsest as pal
    from palimpsest.harness import Harness

    lm_eval.simple_evaluate(Harness(*pal.load("folder")), tasks=["lambada_openai"])

Scores equal those of the harness' own `hf` for the same weights (with `add_bos_token=False`: nothing is put before a text
here). Special tokens may be written in a text, as chat templates do. Needs `palimpsest-lm[eval]`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from palimpsest.config import InputError, SamplingConfig
from palimpsest.evaluate import BLOCK, beginning
from palimpsest.generate import generate
from palimpsest.model import Model
from palimpsest.published import check_tokenizer
from palimpsest.tokenizer import Tokenizer

try:
    from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise InputError("lm-eval is not installed; install palimpsest-lm[eval]") from error

LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # its names for one thing, first come first
KNOWN = {*LENGTHS, "until", "do_sample", "temperature", "top_k", "top_p"}
MOST_NEW_TOKENS = 256  # unless a task says otherwise


class Harness(LM):
    """`max_length` is the longest context; None: what the position table holds, or any length where there is none."""

    def __init__(self, model: Model, tokenizer: Tokenizer | None, batch_size: int = 8, max_length: int | None = None) -> None:
        super().__init__()
        if tokenizer is None:
            raise InputError("harness: the model has no tokenizer; save it with one")
        check_tokenizer(model, tokenizer)
        begin = beginning(tokenizer)
        if begin is None:
            raise InputError("harness: the tokenizer has no token that begins or ends a text; use one that has")
        table = model.config.max_position_embeddings if model.config.position == "learned" else None
        if max_length is not None and not 1 <= max_length <= (table or max_length):
            raise InputError(f"harness: max_length is {max_length}; give at least 1, and at most the position table's {table}")
        self.model, self.tokenizer, self.begin, self.batch_size = model.eval(), tokenizer, begin, batch_size
        self.max_length = max_length or table

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        """Of (context, continuation): the continuation's log-likelihood in nats, and whether greedy drawing would give it."""
        return self._score([self._split(*request.args) for request in requests])

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        """Of (text,): the log-likelihood of all its tokens; in disjoint windows, the last one filled up, above `max_length`."""
        windows, counts = [], []
        for request in requests:
            ids = [self.begin, *self.tokenizer.encode(request.args[0], allow_special=True)]
            limit = self.max_length or len(ids)
            ends = [min(start + limit, len(ids) - 1) for start in range(0, len(ids) - 1, limit)]
            for last, end in zip([0, *ends], ends, strict=False):
                row = ids[max(end - limit, 0) : end + 1]
                windows.append((row[: len(row) - (end - last)], row[len(row) - (end - last) :]))
            counts.append(len(ends))
        found = iter(self._score(windows))
        return [sum(next(found)[0] for _ in range(count)) for count in counts]

    def generate_until(self, requests: list[Any]) -> list[str]:
        """Of (context, options): the text that follows, up to one of `until` or the end token. Greedy unless `do_sample`."""
        alike: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            alike.setdefault(repr(request.args[1]), []).append(i)
        found = [""] * len(requests)
        for members in alike.values():
            for start in range(0, len(members), self.batch_size):
                chosen = members[start : start + self.batch_size]
                contexts = [requests[i].args[0] for i in chosen]
                for i, text in zip(chosen, self._continue(contexts, requests[chosen[0]].args[1]), strict=True):
                    found[i] = text
        return found

    @property
    def tokenizer_name(self) -> str:
        return f"palimpsest-{self.tokenizer.fingerprint[:16]}"

    def _split(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Ids of both. Spaces at the end of the context count to the continuation, and the two are encoded together."""
        kept = context.rstrip()
        whole = self.tokenizer.encode(context + continuation, allow_special=True)
        if not kept:
            return (whole[:1], whole[1:]) if whole[:1] == [self.begin] else ([self.begin], whole)
        before = self.tokenizer.encode(kept, allow_special=True)
        return whole[: len(before)], whole[len(before) :]

    @torch.no_grad()
    def _score(self, pairs: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        found: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
        device = self.model.embed_tokens.weight.device
        order = sorted(range(len(pairs)), key=lambda i: -sum(map(len, pairs[i])))  # the largest batch first: it may not fit
        for start in range(0, len(order), self.batch_size):
            chosen = order[start : start + self.batch_size]
            rows = [self._row(*pairs[i]) for i in chosen]
            bounds = torch.tensor([0, *(len(row) - 1 for row in rows)]).cumsum(0)
            ids = torch.tensor([[token for row in rows for token in row[:-1]]], device=device)
            hidden, _ = self.model.hidden(ids, cu_seqlens=bounds.to(device))
            for i, end in zip(chosen, bounds[1:].tolist(), strict=True):
                answer = torch.tensor(pairs[i][1], dtype=torch.int64, device=device)
                found[i] = self._read(hidden[0, end - len(answer) : end], answer)
        return found

    def _row(self, context: list[int], answer: list[int]) -> list[int]:
        """Context and answer; of a context that is too long the end."""
        if self.max_length is not None and len(answer) > self.max_length:
            raise InputError(f"harness: a continuation has {len(answer)} tokens; max_length is {self.max_length}: give more")
        row = [*context, *answer]
        return row if self.max_length is None else row[-self.max_length - 1 :]

    def _read(self, states: Tensor, answer: Tensor) -> tuple[float, bool]:
        total, greedy, step = 0.0, True, max(BLOCK // self.model.config.vocab_size, 1)
        for i in range(0, len(answer), step):
            logs, part = self.model.logits(states[i : i + step]).log_softmax(-1), answer[i : i + step]
            total += float(logs.gather(-1, part.unsqueeze(-1)).double().sum())
            greedy = greedy and bool((logs.argmax(-1) == part).all())
        return total, greedy

    def _continue(self, contexts: list[str], options: dict[str, Any]) -> list[str]:
        unknown = sorted(set(options) - KNOWN)
        if unknown:
            raise InputError(f"harness: {unknown[0]} is {options[unknown[0]]!r}; generation knows {', '.join(sorted(KNOWN))}")
        length = int(next((options[name] for name in LENGTHS if options.get(name) is not None), MOST_NEW_TOKENS))
        until = options.get("until") or []
        temperature = float(options.get("temperature") or 0.0) if options.get("do_sample", True) else 0.0
        sampling = SamplingConfig(
            max_new_tokens=length,
            temperature=temperature,
            top_k=int(options.get("top_k") or 0),
            top_p=float(options.get("top_p") or 1.0),
            stop=tuple([until] if isinstance(until, str) else filter(None, until)),
        )
        rows = [self.tokenizer.encode(context, allow_special=True) for context in contexts]
        if self.max_length is not None:
            if length >= self.max_length:
                raise InputError(f"harness: {length} new tokens leave no room for a prompt in max_length {self.max_length}")
            rows = [ids[length - self.max_length :] for ids in rows]
        return [str(text) for text in generate(self.model, self.tokenizer, rows, sampling)]
