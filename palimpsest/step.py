"""A decoding step by whole sublayers: on a CPU with the compiled backend, norm and sublayer are one call, or all layers are.

What a layer computes stands in mixers/, mlps.py and moe.py, and nowhere else is it to be looked up; this gives the same numbers
for one new token of each of a few sequences when nothing but they is wanted. In float32 they differ by rounding; in bfloat16
what lies between two sublayers is not rounded on the way. Where it does not apply it gives None, and the modules run.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from palimpsest.linear import Linear, Linear8, RMSNorm
from palimpsest.mixers import KDA, MLA, Attention, DeltaNet, GatedDeltaNet
from palimpsest.mlps import GELU, GatedMLP, situ, swiglu
from palimpsest.moe import Experts, MoE
from palimpsest.ops import cpu, cpu_layer
from palimpsest.ops.cpu_layer import Map, Norm, map_of, numbers
from palimpsest.ops.linear import FEW
from palimpsest.state import LayerState, Recurrent, Segments

# Set on a module, each of these is somebody who wants to see what happens in it, or to have it happen otherwise.
INTERESTS = ("observe", "parallel", "exchange", "remember", "forward", "_compiled_call_impl")


class Unfit(Exception):
    """A sublayer that the compiled call does not know."""


def serves(segments: Segments) -> bool:
    """Whether a pass is such a step."""
    return segments.once("_is_step", lambda: _is_step(segments))


def _is_step(segments: Segments) -> bool:
    dense = segments.cu_seqlens is None and segments.context is None and segments.device.type == "cpu"
    if not dense or not 0 < len(segments.new) <= FEW or set(segments.new) != {1} or torch.is_grad_enabled():
        return False
    return cpu.serves()


class Gathered:
    """What the compiled call reads of a norm and a sublayer, gathered again whenever a module or a weight is another one.

    A copy, of a model for instance, begins with nothing.
    """

    def __init__(self) -> None:
        self._dtype: torch.dtype | None = None
        self._sight: Sight | None = None
        self._found: Any = None

    def __reduce__(self) -> tuple[type[Gathered], tuple[()]]:
        return type(self), ()

    def of(self, dtype: torch.dtype, *modules: nn.Module) -> Any:
        """The structure of cpu_layer.py for inputs of `dtype`, or None where the modules have to run."""
        if self._sight is None or dtype is not self._dtype or not self._sight.holds(*modules):
            self._dtype, self._sight, self._found = dtype, Sight(*modules), None
            if self._sight.is_plain:
                with contextlib.suppress(Unfit):
                    self._found = self._make(dtype, *modules)
        return self._found

    def _make(self, dtype: torch.dtype, *modules: nn.Module) -> Any:
        norm, layer = modules
        return _gather(norm, layer, dtype)


class GatheredLayers(Gathered):
    """The same of all layers of a model, as one array of sublayers, and the weights whose addresses it holds."""

    def _make(self, dtype: torch.dtype, *modules: nn.Module) -> Any:
        parts = [(getattr(each, f"{name}_norm"), getattr(each, name)) for each in modules for name in ("mixer", "mlp")]
        weights = [_gather(*pair, dtype) for pair in parts]
        return (cpu_layer.Sublayer * len(weights))(*map(cpu_layer.sublayer_of, weights)), weights


class Sight:
    """What was seen of a few modules and those inside them, laid out so that every token can see whether it is still so."""

    def __init__(self, *modules: nn.Module) -> None:
        found = [module for top in modules for module in top.modules()]
        inside = [module.__dict__ for module in found]
        self._modules = modules
        self._hooks = [each[kind] for each in inside for kind in ("_forward_hooks", "_forward_pre_hooks")]
        self._hooked = any(self._hooks)
        interests = [(each, name) for each in inside for name in INTERESTS if name in each]
        self._absent = list(zip(*((each, name) for each in inside for name in INTERESTS if name not in each), strict=True))
        parts = [(table, name) for each in inside for table in (each["_parameters"], each["_modules"]) for name in table]
        self._tables, self._names = zip(*interests, *parts, strict=True)
        self._values = [table[name] for table, name in (*interests, *parts)]
        self._weights = [value for value in self._values if isinstance(value, Tensor)]
        # A weight of another kind than a parameter may be anything, a distributed one for instance.
        plain = all(type(weight) is nn.Parameter for weight in self._weights)
        self.is_plain = plain and not self._hooked and all(each[name] is None for each, name in interests)
        self._places = self._where() if plain else []

    def holds(self, *modules: nn.Module) -> bool:
        """Whether it all is as it was: the same modules, weights at the same addresses, nobody new who takes an interest."""
        if len(modules) != len(self._modules) or any(map(operator.is_not, modules, self._modules)):
            return False
        if any(map(operator.contains, *self._absent)):
            return False
        try:
            same = all(map(operator.is_, map(operator.getitem, self._tables, self._names), self._values))
        except KeyError:  # a part was taken out
            return False
        return same and any(self._hooks) == self._hooked and (not self._places or self._where() == self._places)

    def _where(self) -> list[object]:
        return [*map(Tensor.data_ptr, self._weights), *map(operator.attrgetter("dtype"), self._weights)]


def run(
    gathered: GatheredLayers, layers: Sequence[nn.Module], x: Tensor, states: Sequence[LayerState], segments: Segments
) -> tuple[Tensor, list[LayerState]] | None:
    """All layers of a plain residual stream for x [B,1,D], in one call."""
    found = gathered.of(x.dtype, *layers)
    if found is None or not x.is_contiguous() or not all(_fits(state, x, segments) for state in states):
        return None
    sublayers, kept = type(found[0]).from_buffer_copy(found[0]), [found]
    after = [_give(sublayers[2 * index], state, segments, kept) for index, state in enumerate(states)]
    return cpu_layer.run(sublayers, x, segments.past, is_residual=True), after


def mix(
    gathered: Gathered, norm: nn.Module, mixer: nn.Module, x: Tensor, state: LayerState, segments: Segments
) -> tuple[Tensor, LayerState] | None:
    """`mixer(norm(x), state, segments)` for x [B,1,D]."""
    weights = gathered.of(x.dtype, norm, mixer)
    if weights is None or not x.is_contiguous() or not _fits(state, x, segments):
        return None
    sublayers, kept = (cpu_layer.Sublayer * 1)(cpu_layer.sublayer_of(weights)), [weights]
    after = _give(sublayers[0], state, segments, kept)
    return cpu_layer.run(sublayers, x, segments.past), after


def feed(gathered: Gathered, norm: nn.Module, mlp: nn.Module, x: Tensor, segments: Segments) -> Tensor | None:
    """`mlp(norm(x))` for x [B,1,D]."""
    weights = gathered.of(x.dtype, norm, mlp)
    if weights is None or not x.is_contiguous():
        return None
    return cpu_layer.run((cpu_layer.Sublayer * 1)(cpu_layer.sublayer_of(weights)), x, segments.past)


def _fits(state: LayerState, x: Tensor, segments: Segments) -> bool:
    """Whether a state is as the compiled call reads it."""
    if isinstance(state, Recurrent):
        return state.matrix.dtype is torch.float32 and state.conv.dtype is x.dtype
    return max(segments.past) > 0 and all(rows.dtype is x.dtype and rows.stride(-1) == 1 for rows in state.rows.tensors)


def _give(sublayer: cpu_layer.Sublayer, state: LayerState, segments: Segments, kept: list[Any]) -> LayerState:
    """Lets a sublayer read a state and write the one after the step, which comes back; `kept` has to be until then."""
    if isinstance(state, Recurrent):
        before = state.matrix.contiguous(), state.conv.contiguous()
        kept.append(before)
        return Recurrent(*cpu_layer.give_matrix(sublayer, *before))
    rows = state.rows.extend(segments)
    cpu_layer.give_rows(sublayer, *rows.tensors)
    return type(state)(rows)


def _gather(norm: nn.Module, layer: nn.Module, dtype: torch.dtype) -> Any:
    if dtype not in (torch.float32, torch.bfloat16) or not all(weight.is_contiguous() for weight in layer.parameters()):
        raise Unfit
    return _ways.get(type(layer), _refuse)(_norm(norm), layer, dtype)


def _refuse(*_: object) -> Any:
    raise Unfit


def _map(module: Any, dtype: torch.dtype) -> Map:
    """A linear map of a layer; no map for None."""
    if module is None:
        return Map()
    fits = type(module) is Linear8 or (type(module) is Linear and module.weight.dtype is dtype)
    if not fits or (module.bias is not None and module.bias.dtype is not dtype):
        raise Unfit
    if isinstance(module, Linear8):
        return map_of(module.code, module.scale, module.bias)
    return map_of(module.weight, bias=module.bias)


def _norm(module: Any) -> Norm:
    """A norm over the last axis; none for None."""
    if module is None:
        return Norm()
    if type(module) not in (RMSNorm, nn.RMSNorm, nn.LayerNorm) or module.eps is None or module.weight is None:
        raise Unfit
    return Norm(_numbers(module.weight), _numbers(getattr(module, "bias", None)), module.eps, type(module) is nn.LayerNorm)


def _numbers(x: Tensor | None) -> cpu_layer.Numbers:
    if x is not None and x.dtype not in (torch.float32, torch.bfloat16):
        raise Unfit
    return numbers(x)


def _float32(x: Tensor) -> int:
    if x.dtype is not torch.float32:
        raise Unfit
    return x.data_ptr()


def _recurrence(norm: Norm, m: Any, dtype: torch.dtype) -> cpu_layer.Recurrence:
    if m.key_dim > cpu.WIDEST:
        raise Unfit
    is_kda, fades = isinstance(m, KDA), isinstance(m, GatedDeltaNet)
    is_gated = fades and m.gate_activation != "none"
    found = cpu_layer.Recurrence(norm, _norm(m.o_norm))
    found.q, found.k, found.v, found.beta, found.out = (
        _map(x, dtype) for x in (m.q_proj, m.k_proj, m.v_proj, m.b_proj, m.o_proj)
    )
    if fades:
        found.decay_low, found.decay = (_map(x, dtype) for x in ((m.f_a_proj, m.f_b_proj) if is_kda else (None, m.a_proj)))
    if is_gated:
        low = (m.g_a_proj, m.g_b_proj) if m.low_rank else (None, m.g_proj)
        found.gate_low, found.gate = (_map(x, dtype) for x in low)
    if m.taps:
        found.taps = tuple(_float32(conv.weight) for conv in (m.q_conv1d, m.k_conv1d, m.v_conv1d))
    gate = (_float32(m.A_log), _float32(m.dt_bias)) if fades else (None, None)
    bound = (m.lower_bound or 0.0) if is_kda else 0.0
    found.form = cpu.Form((1 if is_kda else 2) if fades else 0, 0, 1, 0, 0, m.key_dim**-0.5, bound, *gate)
    found.heads, found.value_heads, found.key_dim, found.value_dim = m.key_heads, m.value_heads, m.key_dim, m.value_dim
    found.window, found.strongest = m.taps, 2.0 if m.allow_neg_eigval else 1.0
    found.is_silu = is_gated and m.gate_activation == "silu"
    return found


def _attention(norm: Norm, m: Attention, dtype: torch.dtype) -> cpu_layer.Attention:
    maps = (_map(x, dtype) for x in (m.q_proj, m.k_proj, m.v_proj, m.g_proj, m.o_proj))
    sizes = m.heads, m.kv_heads, m.head_dim, m.rotated
    return cpu_layer.Attention(norm, _norm(m.q_norm), _norm(m.k_norm), *maps, *sizes, m.rope_theta)


def _latents(norm: Norm, m: Any, dtype: torch.dtype) -> cpu_layer.Latents:
    if type(m.kv_b_proj) is not Linear:  # it is taken apart
        raise Unfit
    is_low = not hasattr(m, "q_proj")
    queries = (m.q_a_proj, m.q_b_proj) if is_low else (None, m.q_proj)
    maps = (_map(x, dtype) for x in (*queries, m.kv_a_proj_with_mqa, m.kv_b_proj, m.g_proj, m.o_proj))
    norms = _norm(m.q_a_layernorm if is_low else None), _norm(m.kv_a_layernorm)
    return cpu_layer.Latents(norm, *norms, *maps, m.heads, m.rank, m.nope, m.rope, m.value_dim, m.rope_theta or 0.0)


def _activation(function: Callable[[Tensor, Tensor], Tensor]) -> cpu_layer.Activation:
    if function is swiglu:
        return cpu_layer.Activation(1)
    if isinstance(function, partial) and function.func is situ:
        return cpu_layer.Activation(2, function.keywords["beta"], function.keywords["linear_beta"])
    raise Unfit


def _gated_mlp(norm: Norm, m: GatedMLP, dtype: torch.dtype) -> cpu_layer.Mlp:
    return cpu_layer.Mlp(norm, *(_map(x, dtype) for x in (m.gate_proj, m.up_proj, m.down_proj)), _activation(m.activation))


def _gelu(norm: Norm, m: GELU, dtype: torch.dtype) -> cpu_layer.Mlp:
    return cpu_layer.Mlp(norm, Map(), _map(m.up_proj, dtype), _map(m.down_proj, dtype))


def _experts(norm: Norm, m: Any, dtype: torch.dtype) -> cpu_layer.Experts:
    router, shared = m.gate, m.shared_experts
    if type(m.experts) is not Experts or (shared is not None and type(shared) is not GatedMLP):
        raise Unfit
    stacks = m.experts.gate_proj, m.experts.up_proj, m.experts.down_proj
    if any(stack.dtype is not dtype for stack in stacks) or router.weight.dtype not in (torch.float32, torch.bfloat16):
        raise Unfit
    activation = _activation(m.experts.activation)
    if shared is not None and bytes(_activation(shared.activation)) != bytes(activation):
        raise Unfit
    parts = (None,) * 3 if shared is None else (shared.gate_proj, shared.up_proj, shared.down_proj)
    low = (m.routed_expert_down_proj, m.routed_expert_up_proj, m.routed_expert_norm) if m.latent else (None, None, None)
    found = cpu_layer.Experts(norm, _norm(low[2]), map_of(router.weight), _map(low[0], dtype), *map(map_of, stacks))
    found.latent_up, found.shared_open = _map(low[1], dtype), _map(m.shared_expert_gate, dtype)
    found.shared_gate, found.shared_up, found.shared_down = (_map(part, dtype) for part in parts)
    found.selection, found.count, found.top_k = _float32(router.e_score_correction_bias), len(router.weight), router.top_k
    found.activation, found.factor, found.renormalise = activation, router.factor, router.renormalize
    found.is_softmax = router.score == "softmax"
    return found


_ways: dict[type[nn.Module], Callable[..., Any]] = {
    DeltaNet: _recurrence,
    GatedDeltaNet: _recurrence,
    KDA: _recurrence,
    Attention: _attention,
    MLA: _latents,
    GatedMLP: _gated_mlp,
    GELU: _gelu,
    MoE: _experts,
}
