"""Memory of a training step: what autograd keeps for the backward pass, the loss, gradients, optimiser.

Counts are values a token in one sublayer, of this package's own operations; D is the width. A sublayer keeps the input and
the normed input of its norm (rms: 2 D + 1, layer: D + 2), the input of its linear maps (D), and what the mixer or MLP lists
below. Recurrent layers keep three C x C matrices and one state a chunk (`ops/chunked.py`), or, where the compiled backend
runs, one state a tile of its own (`ops/cpu.py`; `compiled`), and its float32 convolution keeps its inputs alone. Integers
are int64.

The peak of a step is the largest of four moments: the loss, when everything is kept; the first gradients, when the head's are
made; the backward pass of the sublayer that works with most; the optimiser, when all gradients are there.
"""

from __future__ import annotations

from dataclasses import dataclass

from palimpsest.config import LINEAR_MIXERS, ModelConfig
from palimpsest.ops.chunked import GROUP
from palimpsest.ops.cpu_conv import MOST_TAPS
from palimpsest.ops.cross_entropy import BLOCK
from palimpsest.plan.counts import SIZES, Weight, weights
from palimpsest.plan.flops import _chunk_size
from palimpsest.plan.memory import conv_channels, kv_values, recurrent_bytes, state_columns

SHARDINGS = ("none", "optimizer", "gradients", "weights")  # what is cut over the devices, each with all before it
VECTORS = ("b_proj", "a_proj", "shared_expert_gate")  # maps that Muon leaves to AdamW
CHUNK, TILE = 64, 32  # tokens of a chunk, and of the compiled backend's tile
# Tensors of shape [C,C], [C,K] and [C,V] that live at once for each chunk of a group in the backward pass (measured).
_GROUP_TENSORS = {
    **{"linear_attention": (0, 6, 1), "deltanet": (2, 9, 4)},
    **{"gated_deltanet": (8, 10, 5), "kda": (2, 18, 4)},
}


@dataclass(frozen=True)
class Kept:
    """Per token: values in the model's dtype, values in float32 whatever that dtype, and int64 values."""

    values: float = 0.0
    precise: float = 0.0
    integers: float = 0.0

    def __add__(self, other: Kept) -> Kept:
        return Kept(self.values + other.values, self.precise + other.precise, self.integers + other.integers)

    def num_bytes(self, dtype: str) -> float:
        return SIZES[dtype] * self.values + 4 * self.precise + 8 * self.integers


def norm(c: ModelConfig) -> Kept:
    return Kept(2 * c.hidden_size, 1) if c.norm == "rms" else Kept(c.hidden_size, 2)


def mixer(kind: str, c: ModelConfig, tokens: int, dtype: str, compiled: bool = False) -> Kept:
    """What a mixer keeps for sequences of `tokens` tokens, the input of its maps included."""
    inner = {"attention": _attention, "mla": _mla}.get(kind)
    return Kept(c.hidden_size) + (_recurrent(kind, c, tokens, dtype, compiled) if inner is None else inner(c))


def _attention(c: ModelConfig) -> Kept:
    queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    values, precise = 2 * queries + 2 * keys, float(c.num_attention_heads)
    if c.position == "rope":
        precise += 2 * int(c.head_dim * c.partial_rotary_factor)  # cosines and sines of queries and keys
    if c.qk_norm:
        values += 2 * (queries + keys)
        precise += c.num_attention_heads + c.num_key_value_heads
    return Kept(values + (2 * queries if c.attention_output_gate else 0), precise)


def _mla(c: ModelConfig) -> Kept:
    heads, rank, rope, value = c.num_attention_heads, c.kv_lora_rank, c.qk_rope_head_dim, c.v_head_dim
    channels = c.qk_nope_head_dim + rope
    values, precise = 3 * rank + rope, 1.0 + heads
    if c.q_lora_rank is not None:
        values, precise = values + 3 * c.q_lora_rank, precise + 1
    if value < channels:  # v and o are padded; their own forms are copies
        values += heads * (4 * channels + value)
    else:
        values += heads * (2 * channels + c.qk_nope_head_dim + 2 * value)
    if not c.mla_use_nope:
        precise += 2 * rope
    return Kept(values + (2 * heads * value if c.mla_use_output_gate else 0), precise)


def _recurrent(kind: str, c: ModelConfig, tokens: int, dtype: str, compiled: bool) -> Kept:
    heads, keys, columns = c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim
    channels, out, taps = conv_channels(c), heads * columns, c.linear_conv_kernel_dim
    kept = Kept(out)  # the input of o_proj
    if kind != "linear_attention" or c.linear_feature_map in ("elu", "product"):
        kept += Kept(channels)  # what q, k, v are cut from
    if taps:
        inside = 0 if _keeps_inputs(c, dtype, compiled) else channels  # the sum that SiLU takes
        kept += Kept(channels * (tokens + taps - 1) / tokens, inside)
    kept += Kept(0, recurrence_keeps(kind, c, tokens, compiled))
    longer = 1 if compiled else _padding(tokens)  # o is a part of what the chunks wrote
    if kind == "linear_attention":
        kept += Kept((1 + longer) * out, heads) if c.linear_output_norm else Kept(0, heads * ((columns + 1) * longer + 1))
        features = {"relu": 2, "product": 4}.get(c.linear_feature_map, 0)
        return kept + Kept(0, features * c.linear_num_key_heads * keys)
    kept += Kept((1 + longer) * out, heads + 2 * c.linear_num_key_heads)  # o and its normed form
    if kind == "deltanet":
        return kept
    kept += Kept(columns, 2 * heads * keys) if kind == "kda" else Kept(0, 2 * heads)  # the gate's two factors
    if c.linear_output_gate != "none":
        kept += Kept(c.linear_output_gate_rank or 0, (3 if c.linear_output_gate == "silu" else 2) * out)
    return kept


def _keeps_inputs(c: ModelConfig, dtype: str, compiled: bool) -> bool:
    """Whether the convolution is the compiled one, which forms its sums again."""
    return compiled and dtype == "f32" and c.linear_conv_kernel_dim <= MOST_TAPS


def recurrence_keeps(kind: str, c: ModelConfig, tokens: int, compiled: bool = True) -> float:
    """Values a token, in float32, that the recurrence itself keeps: q, k, v, gate, write strengths, states that entered."""
    heads, keys, columns = c.linear_num_value_heads, c.linear_key_head_dim, state_columns(c, kind)
    corrects = kind != "linear_attention"
    rates = {"kda": keys, "gated_deltanet": 1}.get(kind, 0)
    inputs = 2 * keys + columns + rates + corrects
    if compiled:
        return heads * (inputs + keys * columns * -(-tokens // TILE) / tokens)
    chunk = _chunk_size(tokens, CHUNK)
    inside = inputs + (3 * chunk + columns if corrects else chunk) + keys * columns / chunk
    return heads * (inside * _padding(tokens) + corrects)


def _padding(tokens: int) -> float:
    """Tokens of whole chunks over real ones: the last chunk is filled up with zeros."""
    chunk = _chunk_size(tokens, CHUNK)
    return -(-tokens // chunk) * chunk / tokens


def mlp(kind: str, c: ModelConfig) -> Kept:
    """What an MLP keeps, the input of its maps included."""
    if kind != "moe":
        return Kept(c.hidden_size + (2 if kind == "gelu" else _gated(kind)) * c.intermediate_size)
    width, latent, chosen = c.hidden_size, c.routed_expert_hidden_size or c.hidden_size, c.num_experts_per_token
    gated = _gated(c.moe_hidden_act)
    renormed = 1 + chosen if c.moe_renormalize else 0
    kept = Kept(width, c.num_experts + renormed, chosen)  # router
    kept += Kept(chosen * (latent + gated * c.moe_intermediate_size), chosen * (latent + 1), 2 * chosen)
    kept += Kept(gated * c.num_shared_experts * c.moe_intermediate_size)
    if c.shared_expert_gate:
        kept += Kept(width + 1)
    if c.routed_expert_hidden_size is not None:
        kept += Kept(3 * latent, 1) if c.latent_moe_use_norm else Kept(latent)
    return kept


def _gated(activation: str) -> int:
    """Tensors of the inner width: SwiGLU keeps gate, silu(gate), up and the product; SiTU five factors and the product."""
    return 6 if activation == "situ" else 4


def sources(c: ModelConfig) -> list[int]:
    """How many sources each sublayer mixes, and last the output; 1 everywhere with the sum residual."""
    if c.residual == "sum":
        return [1] * (2 * c.num_hidden_layers + 1)
    counts, blocks, partial = [], 0, 1
    for layer in range(c.num_hidden_layers):
        for site in range(2):
            counts.append(blocks + partial)
            if c.residual == "full_attention":
                blocks += 1
            elif site == 0 and layer % c.attn_res_block_size == 0:
                blocks, partial = blocks + 1, 0
            partial = 1
    return [*counts, blocks + partial]


def activations(c: ModelConfig, batch: int, tokens: int, dtype: str, recompute: bool = False, compiled: bool = False) -> float:
    """Bytes that autograd keeps between forward and backward of one micro-batch, the loss apart."""
    size, counts = batch * tokens, sources(c)
    if recompute:
        # What is joined between the sublayers, the empty state that each mixer began with, and the last norm.
        kept = Kept(2 * c.num_hidden_layers * c.hidden_size) + norm(c)
        states = batch * (recurrent_bytes(c) + SIZES[dtype] * _conv_values(c))
        return size * kept.num_bytes(dtype) + states + size * _mixing(c, counts[-1:]).num_bytes(dtype) + 8 * size
    kept = norm(c) + _mixing(c, counts) + Kept(0, 0, 1 if c.position != "learned" else 2)
    for kind in c.mixers:
        kept += norm(c) + mixer(kind, c, tokens, dtype, compiled)
    for kind in c.mlps:
        kept += norm(c) + mlp(kind, c)
    taps = sum(4 * c.linear_conv_kernel_dim * conv_channels(c) for kind in c.mixers if kind in LINEAR_MIXERS)
    return size * kept.num_bytes(dtype) + taps


def _mixing(c: ModelConfig, counts: list[int]) -> Kept:
    """Attention over depth: three numbers a source, and at every site the one source that is new."""
    read = [count for count in counts if count > 1]
    return Kept(len(read) * c.hidden_size, 3 * sum(read))


def _conv_values(c: ModelConfig) -> int:
    kinds = sum(kind in LINEAR_MIXERS for kind in c.mixers)
    return kinds * max(c.linear_conv_kernel_dim - 1, 0) * conv_channels(c)


def working(kind: str, c: ModelConfig, batch: int, tokens: int, dtype: str, compiled: bool) -> float:
    """Bytes that the backward pass of a mixer or MLP needs at its height beyond what was kept for it.

    For attention and MLPs these are gradients of the widest tensors. For recurrent layers they are gradients of q, k, v and
    the gate less what the output's part has freed, and the chunk matrices of one group; both fitted to `ops/chunked.py`.
    """
    size, heads, keys, columns = batch * tokens, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim
    if kind in LINEAR_MIXERS:
        square, key, value = _GROUP_TENSORS[kind]
        chunk = _chunk_size(tokens, CHUNK)
        rows = batch * heads * min(max(GROUP // (batch * heads), 1), -(-tokens // chunk))
        group = rows * chunk * (square * chunk + key * keys + value * columns)
        gated = 0 if kind not in ("gated_deltanet", "kda") or c.linear_output_gate == "none" else 2
        freed = (3 + gated + (c.linear_output_gate == "silu")) * heads * columns
        each = heads * ((6 if kind == "kda" else 4) * keys + 2 * columns) - freed
        return 4 * ((0 if compiled else group) + size * each)
    inner = {
        "attention": 2 * (c.num_attention_heads + c.num_key_value_heads) * c.head_dim,
        "mla": 3 * c.num_attention_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim),
        "gelu": c.intermediate_size,
        "moe": 2 * c.num_experts_per_token * (c.routed_expert_hidden_size or c.hidden_size) + c.hidden_size,
    }
    return SIZES[dtype] * size * inner.get(kind, 2 * c.intermediate_size)


def backward(c: ModelConfig, batch: int, tokens: int, dtype: str, recompute: bool, compiled: bool) -> float:
    """Bytes at the height of the backward pass, from the last sublayer down: what is still kept, what the sublayer works
    with, and the gradients made so far."""
    size, made, highest = batch * tokens, 4.0 * c.vocab_size * c.hidden_size, 0.0
    left = activations(c, batch, tokens, dtype, recompute, compiled)
    of_layer = [0.0] * c.num_hidden_layers
    for row in weights(c):
        if row.layer is not None:
            of_layer[row.layer] += row.num_bytes(dtype)
    for layer in reversed(range(c.num_hidden_layers)):
        mixing = mixer(c.mixers[layer], c, tokens, dtype, compiled)
        for kind, kept in ((c.mlps[layer], mlp(c.mlps[layer], c)), (c.mixers[layer], mixing)):
            here = size * (norm(c) + kept).num_bytes(dtype)
            now = left + made + working(kind, c, batch, tokens, dtype, compiled)
            highest = max(highest, now + here + size * c.hidden_size * SIZES[dtype] if recompute else now)
            left -= size * c.hidden_size * SIZES[dtype] if recompute else here
        made += of_layer[layer]
    return highest


def carried(c: ModelConfig, batch: int, tokens: int, dtype: str, recompute: bool, compiled: bool) -> float:
    """Bytes of the new states, which live until the loss is taken; without `recompute` all but the matrices are kept anyway."""
    total = batch * recurrent_bytes(c)
    before = 0 if _keeps_inputs(c, dtype, compiled) else tokens  # torch's form returns a part of all its inputs
    if recompute:
        for kind in c.mixers:
            if kind in LINEAR_MIXERS:
                total += batch * SIZES[dtype] * (before + max(c.linear_conv_kernel_dim - 1, 0)) * conv_channels(c)
            else:
                rope_view = c.kv_lora_rank if kind == "mla" else 0  # the shared key is a part of a wider tensor
                total += batch * tokens * SIZES[dtype] * (kv_values(c, kind) + rope_view)
    return total


def loss(c: ModelConfig, batch: int, tokens: int, dtype: str) -> tuple[float, float]:
    """(bytes that the loss keeps, bytes it uses for a moment): gradients of the head and its input; a block of logits twice,
    the product that is added to the head's gradient, the hidden states and their copy."""
    rows, vocab = batch * (tokens - 1), c.vocab_size
    block = min(rows, max(BLOCK // vocab, 1))
    kept = rows * c.hidden_size * SIZES[dtype] + 4 * vocab * c.hidden_size
    brief = 8 * block * vocab + 4 * vocab * c.hidden_size + (rows + batch * tokens) * c.hidden_size * SIZES[dtype]
    return kept, brief


def optimizer_bytes(c: ModelConfig, optimizer: str, dtype: str) -> int:
    """Moments in float32 (AdamW two, Muon one for matrices), and float32 copies of weights of lower precision."""
    total = 0
    for row in weights(c):
        if row.name.endswith("e_score_correction_bias"):
            continue
        idle = row.name.startswith("layers.0.mixer_residual.")  # the first site has one source and nothing to weigh
        moments = 0 if idle else 1 if optimizer == "muon" and _is_muon(row) else 2
        total += row.numel * 4 * (moments + (row.num_bytes(dtype) < 4 * row.numel))
    return total


def _is_muon(row: Weight) -> bool:
    if row.is_expert:
        return True
    if row.layer is None or len(row.shape) != 2 or row.component in ("router", "layer vectors"):
        return False
    return "conv1d" not in row.name and row.name.split(".")[-2] not in VECTORS


def training_memory(
    c: ModelConfig,
    batch: int,
    tokens: int,
    dtype: str = "f32",
    optimizer: str = "adamw",
    recompute: bool = False,
    accumulation: int = 1,
    sharding: str = "none",
    num_devices: int = 1,
    compiled: bool = False,
) -> dict[str, float]:
    """Bytes on one device for a micro-batch of `batch` sequences there; `peak` is the largest moment of a step.

    With sharding each device holds its part: of the optimiser, of gradients too, of weights too (then the largest layer is
    whole for a moment). Gradients have the weights' dtype.
    """
    rows = weights(c)
    cut = {kind: num_devices if SHARDINGS.index(sharding) >= place else 1 for place, kind in enumerate(SHARDINGS)}
    whole = sum(row.num_bytes(dtype) for row in rows)
    trained = whole - sum(row.num_bytes(dtype) for row in rows if row.name.endswith("e_score_correction_bias"))
    held, gradients = whole / cut["weights"], trained / cut["gradients"]
    moments = optimizer_bytes(c, optimizer, dtype) / cut["optimizer"]
    if cut["weights"] > 1:
        held += max(sum(row.num_bytes(dtype) for row in rows if row.layer == layer) for layer in range(c.num_hidden_layers))
    kept = activations(c, batch, tokens, dtype, recompute, compiled)
    kept_by_loss, brief = loss(c, batch, tokens, dtype)
    earlier = gradients if accumulation > 1 else 0.0
    moments_of_step = (
        kept + kept_by_loss + brief + carried(c, batch, tokens, dtype, recompute, compiled) + earlier,
        kept + 2 * kept_by_loss + earlier,
        backward(c, batch, tokens, dtype, recompute, compiled) + earlier,
        gradients + (2 * gradients if SIZES[dtype] < 4 else 0.0),  # float32 gradients for float32 weights
    )
    parts = {"weights": held, "gradients": gradients, "optimizer": moments, "activations": kept}
    return {**parts, "loss": kept_by_loss + brief, "peak": held + moments + max(moments_of_step)}
