"""A model: embedded tokens, then per layer a mixer over time and an MLP over channels, then a norm and logits.

    h <- join(h, mixer(norm h))     h <- join(h, mlp(norm h))     logits = W norm(h)

`join` is the residual policy. The mixer, the MLP and the policy of every layer come from the `ModelConfig`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from palimpsest import mixers, mlps, residuals, step
from palimpsest.config import InputError, ModelConfig
from palimpsest.context import Context
from palimpsest.linear import Linear, Linear8, RMSNorm
from palimpsest.mixers import GatedDeltaNet, ShortConvolution
from palimpsest.moe import Experts, MoE, PackedExperts, Router
from palimpsest.ops import document_lengths, linear_cross_entropy, mxfp4_encode
from palimpsest.residuals import Site, Stream
from palimpsest.state import LayerState, Segments, State

# Parameters that stay in float32 whatever the model's dtype: they act through exponentials and over thousands of steps, so
# rounding them changes the memory itself.
FLOAT32 = ("A_log", "dt_bias", "conv1d.weight", "e_score_correction_bias")
# The maps that write to the residual stream.
WRITERS = ("o_proj.weight", "mlp.down_proj.weight", "shared_experts.down_proj.weight", "routed_expert_up_proj.weight")


@dataclass(frozen=True)
class Output:
    """logits [B,T,vocab] float32; the state after the tokens; the mean loss in nats over predicted tokens, with labels."""

    logits: Tensor
    state: State
    loss: Tensor | None = None


class Block(nn.Module):
    """One layer: a mixer and an MLP, each behind a norm, joined to the residual stream."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.mixer_norm = norm_of(config, feeds_maps=True)
        self.mixer = mixers.build(config.mixers[index], config)
        self.mlp_norm = norm_of(config, feeds_maps=config.mlps[index] != "moe")  # a router's scores are of float32
        self.mlp = mlps.build(config.mlps[index], config)
        attends = config.residual != "sum"
        self.mixer_residual = Site(config) if attends else None
        self.mlp_residual = Site(config) if attends else None
        self.mixer_step, self.mlp_step = step.Gathered(), step.Gathered()

    def forward(self, stream: Stream, state: LayerState, segments: Segments, recompute: bool = False) -> LayerState:
        """With `recompute` only what is joined between the sublayers is kept for the backward pass."""
        run = partial(checkpoint, use_reentrant=False) if recompute else _call
        sources = stream.sources()
        stream.seal(self.index)
        y, state = run(self._mix, sources, state, segments)
        stream.write(y)
        stream.write(run(self._feed, stream.sources(), segments))
        return state

    def _mix(self, sources: Sequence[Tensor], state: LayerState, segments: Segments) -> tuple[Tensor, LayerState]:
        x = residuals.join(sources, self.mixer_residual)
        if step.serves(segments):
            mixed = step.mix(self.mixer_step, self.mixer_norm, self.mixer, x, state, segments)
            if mixed is not None:
                return mixed
        return self.mixer(self.mixer_norm(x), state, segments)

    def _feed(self, sources: Sequence[Tensor], segments: Segments) -> Tensor:
        x = residuals.join(sources, self.mlp_residual)
        fed = step.feed(self.mlp_step, self.mlp_norm, self.mlp, x, segments) if step.serves(segments) else None
        return self.mlp(self.mlp_norm(x)) if fed is None else fed


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


class Model(nn.Module):
    """Built from a `ModelConfig`; under `torch.device("meta")` no memory is taken, whatever the size."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.recompute = False  # in training: sublayers run again in the backward pass instead of keeping what they made
        self.context: Context | None = None  # in training: the processes that share the tokens of a sequence
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = (
            nn.Embedding(config.max_position_embeddings, config.hidden_size) if config.position == "learned" else None
        )
        self.layers = nn.ModuleList(Block(config, index) for index in range(config.num_hidden_layers))
        self.layers_step = step.GatheredLayers()
        self.output_residual = Site(config) if config.residual != "sum" else None
        self.norm = norm_of(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.reset_parameters()

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """As in torch, but parameters named in FLOAT32 never go below float32 (`.to(torch.bfloat16)` and its like)."""
        kept = {name: parameter.data for name, parameter in self.named_parameters() if name.endswith(FLOAT32)}
        super()._apply(fn, recurse)
        for name, parameter in self.named_parameters():
            if name in kept and parameter.dtype in (torch.bfloat16, torch.float16):
                parameter.data = kept[name].to(parameter.device)
        return self

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws every parameter: matrices N(0, initializer_range), decay rates by their own rule.

        With the sum residual the maps that write to it are scaled by 1/sqrt(2 layers), as in GPT-2.
        """
        std = self.config.initializer_range
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding | Router | ShortConvolution):
                module.weight.normal_(0, std)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    module.bias.zero_()
            elif isinstance(module, Experts):
                for weight in module.parameters():
                    weight.normal_(0, std)
            elif isinstance(module, GatedDeltaNet):
                module.reset_decay(zero_rate=self.config.gate_lower_bound is not None)
            if isinstance(module, ShortConvolution):
                # Near the identity: a fresh layer passes the current token on, at full size.
                module.weight[:, -1] += 1
        if self.config.residual == "sum":
            for name, weight in self.named_parameters():
                plain_expert = name.endswith(".experts.down_proj") and self.config.routed_expert_hidden_size is None
                if plain_expert or name.endswith(WRITERS):
                    weight.mul_((2 * self.config.num_hidden_layers) ** -0.5)

    def forward(
        self,
        ids: Tensor,
        state: State | None = None,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Output:
        """ids int64 [B,T], or packed [1,total] with cu_seqlens [N+1]. Returns logits, the new state and perhaps a loss.

        `attention_mask` [B,T] marks real new tokens with 1; pads anywhere change nothing, and their logits are zero. `labels`
        [B,T] are unshifted (label t is predicted at t-1), -100 is ignored. Raises ValueError for shapes that do not fit.
        """
        if labels is not None:
            _check_labels(ids, labels)
        packed, bounds, keep = self._pack(ids, cu_seqlens, attention_mask)
        hidden, after, segments = self._hidden(packed, state, bounds)
        logits = self.logits(hidden)
        loss = None
        if labels is not None:
            chosen = labels if keep is None else labels[keep].unsqueeze(0)
            loss = next_token_loss(logits, chosen, segments)
        if keep is not None:
            spread = logits.new_zeros(*ids.shape, logits.shape[-1])
            spread[keep] = logits[0]
            logits = spread
        return Output(logits, after, loss)

    def loss(
        self,
        ids: Tensor,
        labels: Tensor,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """`forward(..., labels=labels).loss` without its logits, for training; arguments as there.

        With a `context`, the part of it that this process' tokens make up: the sum over the processes is the loss.
        """
        _check_labels(ids, labels)
        packed, bounds, keep = self._pack(ids, cu_seqlens, attention_mask)
        labels = labels if keep is None else labels[keep].unsqueeze(0)
        segments = self._segments(packed, None, bounds)
        targets = _targets(labels, segments)
        part = None if self.context is None else self.context.part(packed, segments, self.config.linear_conv_kernel_dim)
        if part is None:
            hidden, _ = self._run(packed, None, segments)
            hidden = hidden[:, :-1]
        else:
            packed, segments, _ = part
            hidden, _ = self._run(packed, None, segments)
            targets = F.pad(targets, (0, 1), value=-100)
        count = (targets != -100).sum().clamp(min=1)
        targets = targets if part is None else targets[:, part[2]]
        total = linear_cross_entropy(hidden.flatten(0, 1), self.lm_head.weight, targets.flatten())
        # A row that does not cut is whole on every process, so that each adds its share of it.
        return total / (count if part is not None or self.context is None else count * self.context.size)

    def hidden(
        self,
        ids: Tensor,
        state: State | None = None,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """The normed hidden states [B,T,D] in front of the head, and the new state; arguments as in `forward`."""
        packed, bounds, keep = self._pack(ids, cu_seqlens, attention_mask)
        hidden, after, _ = self._hidden(packed, state, bounds)
        if keep is not None:
            spread = hidden.new_zeros(*ids.shape, hidden.shape[-1])
            spread[keep] = hidden[0]
            hidden = spread
        return hidden, after

    def logits(self, hidden: Tensor) -> Tensor:
        """[...,D] -> [...,vocab] in float32 (float64 when the model is)."""
        logits = self.lm_head(hidden)
        return logits if logits.dtype == torch.float64 else logits.float()

    def new_state(self, batch_size: int = 1) -> State:
        """The state of `batch_size` sequences that have not begun."""
        dtype, device = self.embed_tokens.weight.dtype, self.embed_tokens.weight.device
        layers = [block.mixer.new_state(batch_size, dtype, device) for block in self.layers]  # type: ignore[union-attr]
        return State(layers, (0,) * batch_size)

    def num_parameters(self, active: bool = False) -> int:
        """All parameters, or those one token uses: without token and position tables, the head once, chosen experts."""
        total = _count(self)
        if self.config.tie_word_embeddings and isinstance(self.lm_head, Linear8):
            total -= self.lm_head.code.numel()  # the embedding once more, in eight bits
        if not active:
            return total
        if not self.config.tie_word_embeddings:
            total -= self.embed_tokens.weight.numel()
        if self.embed_positions is not None:
            total -= self.embed_positions.weight.numel()
        for module in self.modules():
            if isinstance(module, Experts):
                count = self.config.num_experts
                idle = count - self.config.num_experts_per_token
                total -= _count(module) // count * idle
        return total

    @torch.no_grad()
    def pack_experts(self) -> None:
        """Turns all routed experts into four-bit ones with the nearest values (MXFP4); they can no longer be trained."""
        for module in self.modules():
            if isinstance(module, MoE) and not isinstance(module.experts, PackedExperts):
                with torch.device(module.experts.gate_proj.device):  # type: ignore[arg-type]
                    packed = PackedExperts(self.config)
                for name, weight in module.experts.named_parameters():
                    if not weight.is_meta:
                        for part, values in zip(("packed", "scale"), mxfp4_encode(weight), strict=True):
                            packed.get_parameter(f"{name}_{part}").data = values
                module.experts = packed

    def _pack(
        self, ids: Tensor, cu_seqlens: Tensor | None, attention_mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Checks the arguments. A mask with pads turns the batch into a packed row: (ids, cu_seqlens, kept tokens)."""
        if ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
            raise InputError(f"ids is {ids.dtype} with shape {list(ids.shape)}; it must be int64 or int32 [B,T]")
        if attention_mask is None:
            return ids, cu_seqlens, None
        if cu_seqlens is not None:
            raise InputError("attention_mask and cu_seqlens were both given; packed tokens have no pads, so leave one out")
        if attention_mask.shape != ids.shape:
            raise InputError(
                f"attention_mask has shape {list(attention_mask.shape)}; it speaks of the new tokens only, {list(ids.shape)}"
            )
        keep = attention_mask.bool()
        if bool(keep.all()):
            return ids, None, None
        return ids[keep].unsqueeze(0), F.pad(keep.sum(1).cumsum(0), (1, 0)), keep

    def _hidden(self, ids: Tensor, state: State | None, cu_seqlens: Tensor | None) -> tuple[Tensor, State, Segments]:
        segments = self._segments(ids, state, cu_seqlens)
        return *self._run(ids, state, segments), segments

    def _segments(self, ids: Tensor, state: State | None, cu_seqlens: Tensor | None) -> Segments:
        batch, tokens = ids.shape
        lengths = [tokens] * batch if cu_seqlens is None else document_lengths(cu_seqlens, batch, tokens)
        if not lengths:
            raise InputError("ids holds no sequences; give at least one (it may have no tokens)")
        if state is not None and (state.batch_size != len(lengths) or len(state.layers) != len(self.layers)):
            raise InputError(
                f"the state holds {state.batch_size} sequences of {len(state.layers)} layers; "
                f"these ids are {len(lengths)} sequences for {len(self.layers)} layers"
            )
        return Segments((0,) * len(lengths) if state is None else state.lengths, tuple(lengths), cu_seqlens, ids.device)

    def _run(self, ids: Tensor, state: State | None, segments: Segments) -> tuple[Tensor, State]:
        if state is None:
            state = self.new_state(len(segments.new))
        else:
            self._check_forms(state)
        self._check_range(ids, segments)
        x = self.embed_tokens(ids)
        if self.embed_positions is not None:
            x = x + self.embed_positions(segments.positions)
        taken = self._step(x, state.layers, segments)
        if taken is None:
            stream = residuals.start(self.config, x)
            again = self.recompute and torch.is_grad_enabled()
            layers = [block(stream, layer, segments, again) for block, layer in zip(self.layers, state.layers, strict=True)]
            taken = residuals.join(stream.sources(), self.output_residual), layers
        return self.norm(taken[0]), State(taken[1], segments.lengths)

    def _step(self, x: Tensor, states: Sequence[LayerState], segments: Segments) -> tuple[Tensor, list[LayerState]] | None:
        """All layers in one compiled call, or None where they run by themselves."""
        if (
            self.output_residual is not None
            or not step.serves(segments)
            or any(type(each) is not Block for each in self.layers)
        ):
            return None
        return step.run(self.layers_step, list(self.layers), x, states, segments)

    def _check_forms(self, state: State) -> None:
        for index, (layer, form) in enumerate(zip(state.layers, self._forms, strict=True)):
            if layer.form != form:
                raise InputError(f"the state's layer {index} holds the memory of another model")

    @cached_property
    def _forms(self) -> list[tuple[object, ...]]:
        return [layer.form for layer in self.new_state(1).layers]

    def _check_range(self, ids: Tensor, segments: Segments) -> None:
        limit, longest = self.config.max_position_embeddings, max(segments.lengths, default=0)
        if self.embed_positions is not None and longest > limit:
            raise InputError(f"the sequence reaches {longest} tokens; this model's position table ends at {limit}")
        # On an accelerator this would wait for the device at every pass; there the embedding's own check has to do.
        if ids.device.type == "cpu" and ids.numel() and not torch.compiler.is_compiling():
            low, high = (int(x) for x in ids.aminmax())
            if low < 0 or high >= self.config.vocab_size:
                wrong = low if low < 0 else high
                raise InputError(f"ids holds {wrong}; this model's vocabulary is 0..{self.config.vocab_size - 1}")


def next_token_loss(logits: Tensor, labels: Tensor, segments: Segments) -> Tensor:
    """Mean cross-entropy in nats of label t under the logits at t-1, inside each sequence; 0 when nothing is predicted."""
    targets = _targets(labels, segments)
    predicted = logits[:, :-1].flatten(0, 1)
    total = F.cross_entropy(predicted, targets.flatten(), ignore_index=-100, reduction="sum")
    return total / (targets != -100).sum().clamp(min=1)


def _check_labels(ids: Tensor, labels: Tensor) -> None:
    if labels.shape != ids.shape:
        raise InputError(f"labels has shape {list(labels.shape)}; expected that of ids, {list(ids.shape)}")


def _targets(labels: Tensor, segments: Segments) -> Tensor:
    """What is predicted at every position but the last, [B,T-1]: the next label of the same sequence, or -100."""
    targets = labels[:, 1:].long()
    if segments.cu_seqlens is not None:
        rows = segments.rows
        targets = targets.masked_fill(rows[:, 1:] != rows[:, :-1], -100)
    return targets


def _count(module: nn.Module) -> int:
    """Parameters; a packed byte holds two, scales are no parameters of their own."""
    sizes = {
        name: parameter.numel() for name, parameter in module.named_parameters() if not name.endswith(("_scale", ".scale"))
    }
    on_disk = sum(getattr(each, "unread", 0) for each in module.modules())
    return on_disk + sum(2 * size if name.endswith("_packed") else size for name, size in sizes.items())


def norm_of(config: ModelConfig, feeds_maps: bool = False) -> nn.Module:
    """The norm of a configuration over its width; `feeds_maps`: only linear maps read the result."""
    if config.norm == "layer":
        return nn.LayerNorm(config.hidden_size, config.rms_norm_eps)
    norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
    norm.feeds_maps = feeds_maps
    return norm
