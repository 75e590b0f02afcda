"""What a model knows and what a memory keeps.

Losses are nats per token, and bits per byte of text so that tokenizers do not matter. A text is read in windows, in one of
two ways: `stateful`, where the state runs on from window to window, so that every token is predicted from all before it; or
`sliding`, where overlapping windows are read each by itself. The readout experiments need no training: they write pairs into
a bare memory and read them back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from palimpsest import ops
from palimpsest.config import InputError
from palimpsest.data import Errors, read_text
from palimpsest.model import Model
from palimpsest.published import check_tokenizer
from palimpsest.tokenizer import Tokenizer

MEMORIES = ("additive", "delta", "gated", "per_channel")
BLOCK = 1 << 24  # logits that live at a time
WINDOW = 1024
FIRST_BUCKET = 4  # tokens seen; every further bucket is as long as all before it


def bits_per_byte(nats_per_token: float, bytes_per_token: float) -> float:
    """Nats per token of a text whose tokens stand for `bytes_per_token` bytes on average, as bits per byte."""
    return nats_per_token / math.log(2) / bytes_per_token


def loss_by_position(model: Model, tokens: np.ndarray | Tensor, context_length: int, windows: int) -> Tensor:
    """Mean nats per token at every position of a window, float64 [context_length - 1].

    Entry i is the loss of token i + 1 given tokens 0..i. Uses the first `windows` whole windows of the token array.
    """
    windows = min(windows, len(tokens) // context_length)
    if windows < 1:
        raise ValueError(f"{len(tokens)} tokens are fewer than one window of {context_length}")
    total = torch.zeros(context_length - 1, dtype=torch.float64)
    with _evaluating(model):
        for start in range(0, windows, 8):
            rows = [tokens[i * context_length : (i + 1) * context_length] for i in range(start, min(start + 8, windows))]
            ids = torch.stack([torch.as_tensor(np.asarray(row).astype(np.int64)) for row in rows])
            logits = model(ids).logits
            losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
            total += losses.double().sum(0)
    return total / windows


class Scores(NamedTuple):
    """Of tokens 1 to T-1 of a sequence, [T-1] each: the loss, float64, and how many tokens it was predicted from, int64."""

    nats: Tensor
    seen: Tensor


def stateful(model: Model, ids: Tensor, window: int = WINDOW, tell: Callable[[int], None] | None = None) -> Scores:
    """ids int64 [T], read `window` tokens at a time with the state carried on: the losses of one pass over them all.

    `tell` is called with the tokens of each window once it is read.
    """
    found, state, last = [], None, None
    with _evaluating(model):
        for start in range(0, len(ids), window):
            piece = ids[start : start + window]
            hidden, state = model.hidden(piece.unsqueeze(0), state)
            before = hidden[0, :-1] if last is None else torch.cat([last, hidden[0, :-1]])
            found.append(_nats(model, before, piece if last is not None else piece[1:]))
            last = hidden[0, -1:]
            if tell is not None:
                tell(len(piece))
    return Scores(torch.cat(found), torch.arange(1, len(ids)))


def sliding(
    model: Model, ids: Tensor, window: int, stride: int, batch_size: int = 8, tell: Callable[[int], None] | None = None
) -> Scores:
    """ids int64 [T], read in windows of `window` tokens that begin `stride` apart, each from a fresh state.

    Every token counts once, in the first window that holds it behind its first place: beyond the first window it is predicted
    from at least `window - stride` tokens. 1 <= stride < window, else InputError.
    """
    if not 1 <= stride < window:
        raise InputError(f"stride is {stride}; windows of {window} tokens may begin 1 to {window - 1} apart")
    count = 1 + max(math.ceil((len(ids) - window) / stride), 0)
    nats, seen = [], []
    with _evaluating(model):
        for first in range(0, count, batch_size):
            starts = range(first * stride, min(first + batch_size, count) * stride, stride)
            for rows in _equal([ids[start : start + window] for start in starts]):
                hidden, _ = model.hidden(rows)
                for row, states in zip(rows, hidden, strict=True):
                    old = 1 if not nats else window - stride
                    nats.append(_nats(model, states[old - 1 : -1], row[old:]))
                    seen.append(torch.arange(old, len(row)))
                    if tell is not None:
                        tell(len(nats[-1]))
    return Scores(torch.cat(nats), torch.cat(seen))


def completes_pair(ids: Sequence[int], seen: Sequence[int]) -> Tensor:
    """Whether token t (of 1 to T-1) and the one before it were seen together before, bool [T-1] (arXiv 2312.04927).

    `seen[t - 1]` is the number of tokens that token t was predicted from; only pairs among these count.
    """
    latest: dict[tuple[int, int], int] = {}
    found = []
    for t in range(1, len(ids)):
        pair = ids[t - 1], ids[t]
        found.append(latest.get(pair, -1) >= t - seen[t - 1])
        latest[pair] = t - 1
    return torch.tensor(found, dtype=torch.bool)


def texts(
    model: Model,
    tokenizer: Tokenizer,
    documents: Iterable[tuple[str, str]],
    window: int | None = None,
    stride: int | None = None,
    tell: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """What the model makes of (name, text) documents, each by itself, ready for JSON.

    With a `stride` in sliding windows, else in stateful ones. A text begins with the tokenizer's token for that (see
    `beginning`), so that all of its tokens are predicted; without such a token the first one is not, and its bytes do not
    count. `tell` is called with tokens done and tokens in all. Raises InputError before anything is computed.
    """
    check_tokenizer(model, tokenizer)
    limit = model.config.max_position_embeddings if model.config.position == "learned" else None
    window = min(WINDOW, limit or WINDOW) if window is None else window
    if window < 2 or (limit is not None and window > limit):
        raise InputError(f"window is {window}; give 2 tokens or more{'' if limit is None else f', here up to {limit}'}")
    rows = [_encoded(tokenizer, name, text) for name, text in documents]
    for name, ids, _ in rows:
        if limit is not None and stride is None and len(ids) > limit:
            remedy = f"give a stride, such as {window // 2}, to read it in windows"
            raise InputError(f"{name}: {len(ids)} tokens; this model's position table ends at {limit}: {remedy}")
    total = sum(len(ids) for _, ids, _ in rows)
    if total == len(rows):
        raise InputError("text: there is no token in it to predict; give a longer one")
    device, done, scores = model.embed_tokens.weight.device, 0, []

    def count(tokens: int) -> None:
        nonlocal done
        done += tokens
        if tell is not None:
            tell(done, total)

    for _, ids, _ in rows:
        tokens = torch.tensor(ids, device=device)
        found = (
            sliding(model, tokens, window, stride, tell=count) if stride is not None else stateful(model, tokens, window, count)
        )
        scores.append(found)
    return {"window": window, "stride": stride, **_summary(rows, scores)}


def documents(paths: Sequence[Path], errors: Errors = "strict") -> Iterator[tuple[str, str]]:
    """(name, text) of every document of these files and folders, see `data.read_text`, however long it is."""
    for path in paths:
        for name, pieces in groupby(read_text([path], errors), key=itemgetter(0)):
            yield name, "".join(text for _, text in pieces)


def beginning(tokenizer: Tokenizer) -> int | None:
    """The id that stands before a text: the token that the tokenizer's config names for it, else its end-of-text token."""
    named = tokenizer.config.get("bos_token")
    named = named.get("content") if isinstance(named, dict) else named
    return tokenizer.special_tokens.get(named, tokenizer.eos_id) if isinstance(named, str) else tokenizer.eos_id


Document = tuple[str, list[int], int]  # name, ids, the bytes of those that are predicted


def _encoded(tokenizer: Tokenizer, name: str, text: str) -> Document:
    ids, begin, size = tokenizer.encode(text), beginning(tokenizer), len(text.encode())
    if begin is not None:
        return name, [begin, *ids], size
    return name, ids, size - len(tokenizer.decode(ids[:1]).encode())


def _summary(rows: Sequence[Document], scores: Sequence[Scores]) -> dict[str, Any]:
    each = []
    for (name, _, size), (nats, _) in zip(rows, scores, strict=True):
        each.append({"name": name, **_means(nats, size)})
    nats, seen = (torch.cat([score[part] for score in scores]) for part in (0, 1))
    repeated = torch.cat([completes_pair(ids, s.seen.tolist()) for (_, ids, _), s in zip(rows, scores, strict=True)])
    edges = FIRST_BUCKET * 2 ** torch.arange(40)
    bucket = torch.bucketize(seen, edges)
    by_seen = []
    for index in bucket.unique().tolist():
        start, end = (int(edges[index - 1]) + 1 if index else 1), int(edges[index])
        by_seen.append({"start": start, "end": min(end, int(seen.max())), **_means(nats[bucket == index])})
    return {
        "texts": each,
        "total": _means(nats, sum(size for _, _, size in rows)),
        "by_tokens_seen": by_seen,
        "recall": {"completes_a_pair": _means(nats[repeated]), "rest": _means(nats[~repeated])},
    }


def _means(nats: Tensor, size: int | None = None) -> dict[str, Any]:
    """Tokens and their mean loss (None for none); with the bytes they stand for also that."""
    mean = float(nats.mean()) if len(nats) else None
    found: dict[str, Any] = {"tokens": len(nats), "nats_per_token": mean}
    if size is not None:
        found |= {"bytes": size, "bits_per_byte": bits_per_byte(float(nats.sum()), size) if size else None}
    return found


@contextmanager
def _evaluating(model: Model) -> Iterator[None]:
    """Without gradients and in evaluation mode; the model is left in the mode it was in."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def _nats(model: Model, hidden: Tensor, targets: Tensor) -> Tensor:
    """The loss of targets [N] under hidden states [N,D], float64 [N] on the CPU; a block of logits at a time."""
    step = max(BLOCK // model.config.vocab_size, 1)
    parts = [
        F.cross_entropy(model.logits(hidden[i : i + step]), targets[i : i + step], reduction="none")
        for i in range(0, len(targets), step)
    ]
    return torch.cat(parts).double().cpu() if parts else torch.zeros(0, dtype=torch.float64)


def _equal(rows: list[Tensor]) -> list[Tensor]:
    """Rows [T] as batches [B,T]: the last one may be shorter than the others and is then a batch of its own."""
    last = rows[-1:] if len(rows[-1]) < len(rows[0]) else []
    return [torch.stack(part) for part in (rows[: len(rows) - len(last)], last) if part]


def position_buckets(losses: Tensor, bytes_per_token: float) -> list[dict[str, float | int]]:
    """Losses by position, averaged over ranges that double in length, in bits per byte."""
    buckets, start, end = [], 0, 4
    while start < len(losses):
        end = min(end, len(losses))
        mean = float(losses[start:end].mean())
        buckets.append({"start": start + 1, "end": end, "bits_per_byte": bits_per_byte(mean, bytes_per_token)})
        start, end = end, end * 2
    return buckets


def render(facts: dict[str, Any]) -> str:
    """The numbers of `texts` as lines for people: of every text, unless there are more than 20, and of all."""
    total = {"name": "all", **facts["total"]}
    rows = [*facts["texts"], total] if 1 < len(facts["texts"]) <= 20 else [total]
    lines = [f"{'text':<40} {'tokens':>10} {'bytes':>11} {'nats/token':>10} {'bits/byte':>9}"]
    for row in rows:
        losses = f"{_shown(row['nats_per_token']):>10} {_shown(row['bits_per_byte']):>9}"
        lines.append(f"{row['name'][-40:]:<40} {row['tokens']:>10,} {row['bytes']:>11,} {losses}")
    lines += ["", f"{'tokens seen before':<40} {'tokens':>10} {'':>11} {'nats/token':>10}"]
    for row in facts["by_tokens_seen"]:
        span = f"{row['start']:,} to {row['end']:,}"
        lines.append(f"{span:<40} {row['tokens']:>10,} {'':>11} {_shown(row['nats_per_token']):>10}")
    lines.append("")
    for name, label in (("completes_a_pair", "completes a pair seen before"), ("rest", "the rest")):
        row = facts["recall"][name]
        lines.append(f"{label:<40} {row['tokens']:>10,} {'':>11} {_shown(row['nats_per_token']):>10}")
    return "\n".join(lines)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def readout(
    pairs: list[int], key_dim: int = 64, value_dim: int = 64, cosine: float = 0.5, trials: int = 8, seed: int = 0
) -> dict[str, Any]:
    """Untrained memories: n key-value pairs are written once each, then every key is read back.

    Reports the relative error ||read - value|| / ||value|| (root mean square over pairs and trials) for each of MEMORIES,
    for random unit keys and for keys whose expected pairwise cosine is `cosine`; and after one of 16 keys is written a
    second time with a new value, the error against the new and against the old value. The delta family writes with
    beta = 1. `gated` fades by the same log decay in every channel; `per_channel` fades half of the channels at twice that
    rate and keeps the other half, so that the mean rate is the same.
    """
    generator = torch.Generator().manual_seed(seed)
    memories = _memories(key_dim, decay=-0.01)
    result: dict[str, Any] = {"key_dim": key_dim, "value_dim": value_dim, "cosine": cosine}
    result["gate"] = (
        "gated: log decay -0.01 a step in every channel; per-channel: -0.02 in half of the channels and 0 in the others"
    )
    for name, rho in (("random", 0.0), ("correlated", cosine)):
        rows = []
        for count in pairs:
            k = _keys(trials, count, key_dim, rho, generator)
            v = torch.randn(trials, count, 1, value_dim, generator=generator, dtype=torch.float64)
            errors = {m: _relative(_recall(write, k, v, k), v) for m, write in memories.items()}
            rows.append({"pairs": count, **errors})
        result[name] = rows
    k = _keys(trials, 16, key_dim, 0.0, generator)
    v = torch.randn(trials, 17, 1, value_dim, generator=generator, dtype=torch.float64)
    twice = torch.cat([k, k[:, :1]], 1)
    result["overwrite"] = []
    for memory, write in memories.items():
        read = _recall(write, twice, v, k[:, :1])
        new, old = _relative(read, v[:, 16:]), _relative(read, v[:, :1])
        result["overwrite"].append({"memory": memory, "error_new": new, "error_old": old})
    return result


Write = Callable[[Tensor, Tensor], Tensor]


def _memories(key_dim: int, decay: float) -> dict[str, Write]:
    """Each memory as a function that writes k [B,n,1,K], v [B,n,1,V] and returns the state [B,1,K,V]."""
    channels = torch.zeros(key_dim, dtype=torch.float64)
    channels[: key_dim // 2] = 2 * decay

    def ones(k: Tensor) -> Tensor:
        return k.new_ones(k.shape[:3])

    return {
        "additive": lambda k, v: ops.linear_attention(k, k, v)[1],
        "delta": lambda k, v: ops.delta_rule(k, k, v, ones(k))[1],
        "gated": lambda k, v: ops.gated_delta_rule(k, k, v, decay * ones(k), ones(k))[1],
        "per_channel": lambda k, v: ops.kda(k, k, v, channels.expand_as(k), ones(k))[1],
    }


def _keys(trials: int, count: int, dim: int, cosine: float, generator: torch.Generator) -> Tensor:
    """Unit keys [trials,count,1,dim] float64 with the given expected pairwise cosine."""

    def unit(*shape: int) -> Tensor:
        return F.normalize(torch.randn(*shape, generator=generator, dtype=torch.float64), dim=-1)

    shared, own = unit(trials, 1, 1, dim), unit(trials, count, 1, dim)
    return F.normalize(math.sqrt(cosine) * shared + math.sqrt(1 - cosine) * own, dim=-1)


def _recall(write: Write, k: Tensor, v: Tensor, probes: Tensor) -> Tensor:
    return torch.einsum("bhkv,bnhk->bnhv", write(k, v), probes)


def _relative(read: Tensor, value: Tensor) -> float:
    return float((read - value).square().sum().sqrt() / value.square().sum().sqrt())
