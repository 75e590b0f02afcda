"""What a model did with a prompt: what every layer wrote, what its memory holds, what it looks at, what it chooses.

Of a recurrent memory with unit keys k_t, values v_t, log decay g_t and write strength beta_t (ops/reference.py), S_t being the
matrix behind token t:

    half-life of a channel      ln 2 / mean_t(-g_t)
    effective rank of S         exp(-sum_i p_i ln p_i), p_i = sigma_i / sum sigma (Roy and Vetterli, 2007)
    readout of pair s at t      |S_t^T k_s - v_s| / |v_s|: 0 is exact, 1 is as far off as an empty memory

Of softmax layers the attention that falls on chosen tokens; of mixtures of experts how often each was chosen; of attention
residuals how much of each source a sublayer reads. Nothing of this changes what the model computes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from palimpsest import ops
from palimpsest.config import InputError
from palimpsest.mixers import MLA, Attention, DeltaNet, GatedDeltaNet, LinearAttention
from palimpsest.mixers.linear_attention import NORMALISER_EPS
from palimpsest.model import Model
from palimpsest.moe import MoE
from palimpsest.ops.reference import recurrence
from palimpsest.residuals import depth_weights
from palimpsest.tokenizer import Tokenizer

LONGEST = 1024  # tokens of a prompt: every pair is read at every later token
PLACES = 32  # tokens behind which norm and rank are taken


@dataclass(frozen=True)
class Memory:
    """A recurrent layer. Without a gate `half_life` is None, without the delta rule `beta` is."""

    layer: int
    kind: str
    half_life: Tensor | None  # tokens, [HV,K], or [HV,1] where a head has one rate; inf where nothing fades
    beta: Tensor | None  # [T,HV]
    places: tuple[int, ...]  # tokens behind which norm and rank were taken; the last one is the last token
    norm: Tensor  # Frobenius norm of S, [places,HV]
    rank: Tensor  # effective rank of S, [places,HV], between 1 and min(K,V)
    readout: Tensor  # error of pair s behind token t, over all heads together, [T,T] by (s, t); nan for t < s


@dataclass(frozen=True)
class Retrieval:
    """A softmax layer, with or without latents: the share of each token's attention that falls on the chosen ones."""

    layer: int
    kind: str
    mass: Tensor  # [T,H]
    last: Tensor  # where the last token looks, [H,T]


@dataclass(frozen=True)
class Choice:
    """A mixture of experts: how many tokens chose each expert, int64 [E]; they sum to T times the chosen ones."""

    layer: int
    counts: Tensor


@dataclass(frozen=True)
class Depth:
    """A place that reads the residual by attention: the mean weight of each source, [S]; the first is the embedding."""

    place: str
    weights: Tensor


@dataclass(frozen=True)
class View:
    """All layers of one kind each, from the first."""

    tokens: int
    answer: tuple[int, ...]
    memories: tuple[Memory, ...]
    retrievals: tuple[Retrieval, ...]
    choices: tuple[Choice, ...]
    depth: tuple[Depth, ...]


@torch.no_grad()
def look(model: Model, ids: Tensor, answer: Sequence[int] = (0,)) -> View:
    """Reads a prompt, ids int64 [T], 2 <= T <= LONGEST. `answer` are the tokens whose share of the attention is taken.

    Raises InputError for a prompt of another length and an answer outside of it.
    """
    tokens, limit = len(ids), LONGEST
    if model.config.position == "learned":
        limit = min(limit, model.config.max_position_embeddings)
    if not 2 <= tokens <= limit:
        raise InputError(f"prompt: it has {tokens} tokens; 2 to {limit} can be looked into")
    answer = sorted(set(answer))
    wrong = [place for place in answer if not 0 <= place < tokens]
    if wrong or not answer:
        raise InputError(f"answer: token {wrong[0] if wrong else 'none'} is not in the prompt of {tokens} tokens")
    seen: dict[str, dict[int, Any]] = {"written": {}, "scored": {}, "chosen": {}}
    depth: list[Depth] = []
    was_training = model.training
    model.eval()
    try:
        with ExitStack() as stack:
            for layer, block in enumerate(model.layers):
                stack.enter_context(_watched(block, layer, seen))
            for name, module in model.named_modules():
                if name.endswith("_residual"):
                    stack.callback(module.register_forward_pre_hook(_weigher(name, depth)).remove)
            model.hidden(ids.unsqueeze(0))
    finally:
        model.train(was_training)
    kinds = model.config.mixers
    return View(
        tokens,
        tuple(answer),
        tuple(_memory(layer, kinds[layer], *found) for layer, found in seen["written"].items()),
        tuple(_retrieval(layer, kinds[layer], answer, *found) for layer, found in seen["scored"].items()),
        tuple(Choice(layer, counts) for layer, counts in seen["chosen"].items()),
        tuple(depth),
    )


def find(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> list[int]:
    """The tokens of `ids` that spell the last place where their text holds `text`. Raises InputError when it does not."""
    stream, ends, whole = tokenizer.decode_stream(), [], ""
    for token in ids:
        whole += stream.push(token)
        ends.append(len(whole))
    begin = whole.rfind(text)
    if begin < 0 or not text:
        raise InputError(f"answer: {text!r} does not stand in the prompt; give a part of it")
    starts = [0, *ends[:-1]]
    end = begin + len(text)
    return [i for i, (a, b) in enumerate(zip(starts, ends, strict=True)) if a < end and max(a + 1, b) > begin]


@contextmanager
def _watched(block: Any, layer: int, seen: dict[str, dict[int, Any]]) -> Iterator[None]:
    """Notes what the layer's mixer is given and scores, and what its router chooses."""
    mixer, gate = block.mixer, block.mlp.gate if isinstance(block.mlp, MoE) else None
    held = (mixer.observe if isinstance(mixer, Attention | MLA) else None), (None if gate is None else gate.observe)
    if isinstance(mixer, LinearAttention):
        inner = mixer.remember

        def remember(x: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
            seen["written"][layer] = (mixer, x, k, v)
            return inner(x, q, k, v, *rest)

        mixer.remember = remember  # type: ignore[method-assign]
    else:
        mixer.observe = lambda q, k, past, scale: seen["scored"].__setitem__(layer, (q, k, scale))
    if gate is not None:
        count = gate.weight.shape[0]
        gate.observe = lambda logits, experts: seen["chosen"].__setitem__(
            layer, torch.bincount(experts.flatten(), minlength=count).cpu()
        )
    try:
        yield
    finally:
        if isinstance(mixer, LinearAttention):
            del mixer.remember
        else:
            mixer.observe = held[0]
        if gate is not None:
            gate.observe = held[1]


def _weigher(name: str, depth: list[Depth]) -> Any:
    """A hook for a Site: notes the mean of its weights over the tokens."""
    parts = name.split(".")
    place = "head" if len(parts) == 1 else f"layer {parts[1]}, {parts[2].removesuffix('_residual')}"

    def note(site: Any, arguments: tuple[Any, ...]) -> None:
        weights = depth_weights(arguments[0], site.norm, site.proj, site.eps)
        depth.append(Depth(place, weights.flatten(0, -2).mean(0).cpu()))

    return note


def _memory(layer: int, kind: str, mixer: Any, x: Tensor, k: Tensor, v: Tensor) -> Memory:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    g = mixer.log_decay(x) if isinstance(mixer, GatedDeltaNet) else None
    beta = mixer.write_strength(x) if isinstance(mixer, DeltaNet) else None
    k = ops.l2norm(k) if isinstance(mixer, DeltaNet) else mixer.feature_map_k(k.to(dtype))
    k = k.repeat_interleave(mixer.value_heads // mixer.key_heads, 2)
    v = v.to(dtype)
    normalised = mixer.state_columns == 1
    written = F.pad(v, (0, 1), value=1.0) if normalised else v
    state = written.new_zeros(1, mixer.value_heads, mixer.key_dim, written.shape[-1])
    tokens, channels = v.shape[1], v.shape[-1]
    readout = v.new_full((tokens, tokens), math.nan)
    places = tuple(sorted({round(i * (tokens - 1) / (PLACES - 1)) for i in range(PLACES)}))
    norm, rank = [], []
    size = v[0].flatten(1).norm(dim=-1)
    for t in range(tokens):
        now = slice(t, t + 1)
        decay, strength = (None if gate is None else gate[:, now] for gate in (g, beta))
        _, state = recurrence(k[:, now], k[:, now], written[:, now], decay, strength, state, None)
        read = torch.einsum("hkv,shk->shv", state[0], k[0, : t + 1])
        if normalised:
            read = read[..., :-1] / (read[..., -1:] + NORMALISER_EPS)
        readout[: t + 1, t] = (read - v[0, : t + 1]).flatten(1).norm(dim=-1) / size[: t + 1]
        if t in places:
            matrix = state[0, ..., :channels]
            norm.append(matrix.flatten(1).norm(dim=-1))
            rank.append(effective_rank(matrix))
    half_life = None if g is None else math.log(2) / (-g[0]).mean(0)
    parts = (torch.stack(norm), torch.stack(rank), readout)
    return Memory(
        layer,
        kind,
        None if half_life is None else half_life.cpu(),
        None if beta is None else beta[0].cpu(),
        places,
        *(part.cpu() for part in parts),
    )


def effective_rank(matrix: Tensor) -> Tensor:
    """[...,K,V] -> [...]: the exponential of the entropy of the singular values' shares; 0 for a matrix of zeros."""
    sigma = torch.linalg.svdvals(matrix)
    total = sigma.sum(-1, keepdim=True)
    shares = sigma / total.clamp(min=torch.finfo(sigma.dtype).tiny)
    rank = torch.exp(torch.special.entr(shares).sum(-1))
    return torch.where(total.squeeze(-1) > 0, rank, torch.zeros_like(rank))


def _retrieval(layer: int, kind: str, answer: Sequence[int], q: Tensor, k: Tensor, scale: float) -> Retrieval:
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    scores = torch.einsum("thd,shd->hts", q[0].to(dtype), k[0].to(dtype)) * scale
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return Retrieval(layer, kind, weights[..., list(answer)].sum(-1).T.cpu(), weights[:, -1].cpu())
