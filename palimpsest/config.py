"""The three configurations: what a model is, how it is trained, how text is drawn from it.

Each is a frozen dataclass that is checked once, when it is made. A mistake raises `InputError`, whose text is one line
that names the field, the value and the remedy.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

MIXERS = ("attention", "linear_attention", "deltanet", "gated_deltanet", "kda", "mla")
MLPS = ("gelu", "swiglu", "situ", "moe")
DELTA_MIXERS = ("deltanet", "gated_deltanet", "kda")
LINEAR_MIXERS = ("linear_attention", *DELTA_MIXERS)


class InputError(ValueError):
    """A mistake in what the user gave. The text is one line: the file or field, the value, and what to do."""


def suggestion(name: str, known: typing.Iterable[str]) -> str:
    """A tail such as `; did you mean 'hidden_size'?`, or the empty string when nothing is close."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


@dataclass(frozen=True)
class _Config:
    """Shared by the three configurations: type checks on construction, dictionaries in and out."""

    _label: ClassVar[str] = "config"

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            coerced = _coerce(value, hints[field.name])
            if coerced is _WRONG:
                is_huge = isinstance(value, int) and not -MOST <= value < MOST
                wanted = "below 2**63" if is_huge else _describe(hints[field.name])
                raise InputError(f"{self._label}: {field.name} is {value!r}; it must be {wanted}")
            object.__setattr__(self, field.name, coerced)
        self._check()

    def _check(self) -> None:
        """Relations between fields."""

    def _require(self, holds: bool, field: str, remedy: str) -> None:
        if not holds:
            raise InputError(f"{self._label}: {field} is {getattr(self, field)!r}; {remedy}")

    @classmethod
    def from_dict(cls, values: dict[str, Any], source: str = "") -> Self:
        """A configuration from plain values. `source` (a file name) opens every error line."""
        known = {f.name: f for f in dataclasses.fields(cls)}
        where = f"{source}: " if source else ""
        if not isinstance(values, dict):
            raise InputError(f"{where}{cls._label}: expected a table of fields, found {type(values).__name__}")
        for name in values:
            if name not in known:
                raise InputError(f"{where}{cls._label}: unknown field {name!r}{suggestion(name, known)}")
        for name, field in known.items():
            if name not in values and field.default is dataclasses.MISSING:
                raise InputError(f"{where}{cls._label}: field {name!r} is missing")
        try:
            return cls(**values)
        except InputError as error:
            raise InputError(f"{where}{error}") from None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON; `from_dict` gives the same configuration back."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, checked anew."""
        return type(self).from_dict({**self.to_dict(), **changes})


_WRONG = object()
MOST = 2**63  # whole numbers are below it, as in tensors and files


def _coerce(value: Any, hint: Any) -> Any:
    """`value` as the annotated type (lists become tuples, whole numbers become floats), or `_WRONG`."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        for option in typing.get_args(hint):
            coerced = _coerce(value, option)
            if coerced is not _WRONG:
                return coerced
        return _WRONG
    if origin is Literal:
        return value if value in typing.get_args(hint) and not isinstance(value, bool) else _WRONG
    if origin is tuple:
        if not isinstance(value, list | tuple):
            return _WRONG
        items = tuple(_coerce(item, typing.get_args(hint)[0]) for item in value)
        return _WRONG if _WRONG in items else items
    if hint in (int, float) and isinstance(value, int) and (isinstance(value, bool) or not -MOST <= value < MOST):
        return _WRONG
    if hint is float and isinstance(value, int):
        return float(value)
    if isinstance(value, float) and not math.isfinite(value):
        return _WRONG
    return value if isinstance(value, hint) else _WRONG


def _describe(hint: Any) -> str:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_describe(option) for option in typing.get_args(hint))
    if origin is Literal:
        return "one of " + ", ".join(repr(option) for option in typing.get_args(hint))
    if origin is tuple:
        return f"a list, each entry {_describe(typing.get_args(hint)[0])}"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "none"}
    return names[hint]


@dataclass(frozen=True)
class ModelConfig(_Config):
    """Everything that decides a model: one mixer and one MLP per layer, one residual policy, and the sizes.

    Sizes a model does not use may stay at their defaults. The names are the field's usual ones; letters in brackets are
    those of the shape comments: H key heads, HV value heads, K and V channels per head, R latent rank, E experts.
    """

    _label: ClassVar[str] = "model"

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    mixers: tuple[Literal["attention", "linear_attention", "deltanet", "gated_deltanet", "kda", "mla"], ...]
    mlps: tuple[Literal["gelu", "swiglu", "situ", "moe"], ...]
    # Residual policy. `block_attention` seals a block every `attn_res_block_size` layers (a layer is two sublayers).
    residual: Literal["sum", "full_attention", "block_attention"] = "sum"
    attn_res_block_size: int = 12
    # Everywhere.
    norm: Literal["rms", "layer"] = "rms"
    rms_norm_eps: float = 1e-5  # of either norm
    use_bias: bool = False  # on the linear maps of softmax attention and of dense MLPs (GPT-2)
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    # Softmax attention.
    num_attention_heads: int = 4
    num_key_value_heads: int = 4
    head_dim: int = 16
    position: Literal["none", "learned", "rope"] = "none"
    max_position_embeddings: int = 1024  # rows of the learned table
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 1.0
    attention_output_gate: bool = False
    qk_norm: bool = False
    # Linear attention, DeltaNet, Gated DeltaNet, KDA.
    linear_num_key_heads: int = 4  # H
    linear_num_value_heads: int = 4  # HV
    linear_key_head_dim: int = 16  # K
    linear_value_head_dim: int = 16  # V
    linear_conv_kernel_dim: int = 4  # taps of the short convolution; 0 leaves it out
    linear_output_gate: Literal["none", "silu", "sigmoid"] = "none"
    linear_output_gate_rank: int | None = None  # None: full rank
    linear_output_gate_bias: bool = False  # on the gate's last map
    linear_feature_map: Literal["elu", "relu", "identity", "product"] = "elu"  # of linear attention; elu is elu(x) + 1
    linear_output_norm: bool = False  # linear attention: RMSNorm per head in place of the normaliser
    gate_lower_bound: float | None = None  # KDA: None is the softplus gate, -5 the bounded one of K3
    allow_neg_eigval: bool = False  # write strength in (0, 2) instead of (0, 1)
    # Multi-head latent attention.
    q_lora_rank: int | None = None
    kv_lora_rank: int = 32  # R
    qk_nope_head_dim: int = 16
    qk_rope_head_dim: int = 8
    v_head_dim: int = 16
    mla_use_nope: bool = True  # True: nothing is rotated, the extra channels stay
    mla_use_output_gate: bool = False
    # MLPs.
    intermediate_size: int = 256
    activation_situ_beta: float = 4.0
    activation_situ_linear_beta: float = 25.0
    # Mixture of experts.
    num_experts: int = 8  # E
    num_experts_per_token: int = 2
    num_shared_experts: int = 1
    moe_intermediate_size: int = 64
    moe_hidden_act: Literal["swiglu", "situ"] = "swiglu"
    routed_expert_hidden_size: int | None = None  # latent width; None: experts see the full width
    latent_moe_use_norm: bool = True
    moe_router_activation_func: Literal["sigmoid", "softmax"] = "sigmoid"
    moe_renormalize: bool = True
    routed_scaling_factor: float = 1.0
    shared_expert_gate: bool = False

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> ModelConfig:
        """A named configuration (`palimpsest.presets()` lists them) with any fields overridden.

        When only `num_hidden_layers` is overridden, the preset's mixers repeat and its last MLP is continued.
        """
        from palimpsest.presets import preset

        return preset(name, **overrides)

    def _check(self) -> None:
        counts = ["vocab_size", "hidden_size", "num_hidden_layers", "attn_res_block_size", "num_attention_heads"]
        counts += ["num_key_value_heads", "head_dim", "max_position_embeddings", "linear_num_key_heads"]
        counts += ["linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim", "kv_lora_rank"]
        counts += ["qk_nope_head_dim", "v_head_dim", "intermediate_size", "num_experts", "num_experts_per_token"]
        counts += ["moe_intermediate_size", "linear_output_gate_rank", "q_lora_rank", "routed_expert_hidden_size"]
        for name in counts:
            value = getattr(self, name)
            self._require(value is None or value >= 1, name, "it must be at least 1")
        for name in ("linear_conv_kernel_dim", "qk_rope_head_dim", "num_shared_experts"):
            self._require(getattr(self, name) >= 0, name, "it must not be negative")
        for name in ("rms_norm_eps", "rope_theta", "initializer_range", "activation_situ_beta"):
            self._require(getattr(self, name) > 0, name, "it must be above 0")
        self._require(self.activation_situ_linear_beta > 0, "activation_situ_linear_beta", "it must be above 0")
        self._check_layers()
        self._check_heads()
        self._check_experts()

    def _check_layers(self) -> None:
        layers = self.num_hidden_layers
        self._require(len(self.mixers) == layers, "mixers", f"it needs one entry for each of the {layers} layers")
        self._require(len(self.mlps) == layers, "mlps", f"it needs one entry for each of the {layers} layers")
        has_attention = "attention" in self.mixers
        self._require(
            self.position != "rope" or has_attention, "position", "rotary positions need a layer with mixer 'attention'"
        )
        self._require(
            self.gate_lower_bound is None or "kda" in self.mixers,
            "gate_lower_bound",
            "only a 'kda' layer has this gate; leave it none",
        )
        gated = any(mixer in ("gated_deltanet", "kda") for mixer in self.mixers)
        self._require(
            self.linear_output_gate == "none" or gated,
            "linear_output_gate",
            "only 'gated_deltanet' and 'kda' layers have an output gate; set it to 'none'",
        )

    def _check_heads(self) -> None:
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if "attention" in self.mixers:
            self._require(heads % kv_heads == 0, "num_key_value_heads", f"it must divide num_attention_heads ({heads})")
        if any(mixer in LINEAR_MIXERS for mixer in self.mixers):
            self._require(
                self.linear_num_value_heads % self.linear_num_key_heads == 0,
                "linear_num_value_heads",
                f"it must be a multiple of linear_num_key_heads ({self.linear_num_key_heads})",
            )
        self._require(0 < self.partial_rotary_factor <= 1, "partial_rotary_factor", "it must be in (0, 1]")
        if self.position == "rope":
            rotated = int(self.head_dim * self.partial_rotary_factor)
            self._require(
                rotated >= 2 and rotated % 2 == 0,
                "head_dim",
                f"times partial_rotary_factor it is {rotated}, which rotates in pairs and so must be even",
            )
        if "mla" in self.mixers and not self.mla_use_nope:
            self._require(
                self.qk_rope_head_dim >= 2 and self.qk_rope_head_dim % 2 == 0,
                "qk_rope_head_dim",
                "it rotates in pairs and so must be even",
            )
        if self.gate_lower_bound is not None:
            self._require(-5 <= self.gate_lower_bound < 0, "gate_lower_bound", "it must be in [-5, 0)")

    def _check_experts(self) -> None:
        if "moe" not in self.mlps:
            return
        self._require(
            self.num_experts_per_token <= self.num_experts,
            "num_experts_per_token",
            f"it must not exceed num_experts ({self.num_experts})",
        )
        self._require(
            not self.shared_expert_gate or self.num_shared_experts > 0,
            "shared_expert_gate",
            "there is no shared expert to gate; set num_shared_experts to 1 or more",
        )


@dataclass(frozen=True)
class TrainConfig(_Config):
    """How a model is trained. A step consumes `batch_size * accumulation` sequences of `context_length` tokens."""

    _label: ClassVar[str] = "train"

    steps: int = 1000
    batch_size: int = 16  # sequences per forward pass
    context_length: int = 256  # tokens per sequence
    separate_documents: bool = False  # nothing is carried over an end of text; else documents are read as one stream
    accumulation: int = 1  # forward passes per optimiser step
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: for matrices; all else stays with AdamW at the same rate
    learning_rate: float = 1e-3
    min_learning_rate_ratio: float = 0.1  # the last learning rate as a share of the highest
    warmup_steps: int = 100
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    decay_share: float = 0.2  # wsd: the share of the steps that decays at the end
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    moe_balance: Literal["none", "sign", "quantile"] = "quantile"  # how the selection bias of experts follows their load
    moe_balance_rate: float = 1e-3  # sign: the step of a bias
    qk_clip: float = 0.0  # softmax heads with larger logits are scaled down after a step (qkclip.py; 100 is usual); 0 is off
    grad_clip: float = 1.0  # largest global gradient norm; 0 turns clipping off
    precision: Literal["fp32", "bf16"] = "fp32"  # bf16: autocast of the matrix products, weights stay fp32
    recompute: bool = False  # sublayers run again in the backward pass: less memory, about a third more time
    compile: bool = False  # torch.compile of mixers and MLPs: a minute at the start, faster steps on a GPU
    seed: int = 0
    log_every: int = 10  # steps
    eval_every: int = 200  # steps; 0 evaluates only at the end
    eval_tokens: int = 65536
    checkpoint_every: int = 200  # steps; 0 saves only at the end
    keep_checkpoints: int = 2

    def _check(self) -> None:
        for name in ("steps", "batch_size", "context_length", "accumulation", "log_every", "eval_tokens"):
            self._require(getattr(self, name) >= 1, name, "it must be at least 1")
        self._require(self.keep_checkpoints >= 1, "keep_checkpoints", "it must be at least 1")
        for name in ("warmup_steps", "weight_decay", "qk_clip", "grad_clip", "seed", "eval_every", "checkpoint_every"):
            self._require(getattr(self, name) >= 0, name, "it must not be negative")
        self._require(self.learning_rate > 0, "learning_rate", "it must be above 0")
        self._require(0 <= self.min_learning_rate_ratio <= 1, "min_learning_rate_ratio", "it must be in [0, 1]")
        self._require(self.moe_balance_rate > 0, "moe_balance_rate", "it must be above 0")
        self._require(0 <= self.decay_share <= 1, "decay_share", "it must be in [0, 1]")
        for name in ("beta1", "beta2"):
            self._require(0 <= getattr(self, name) < 1, name, "it must be in [0, 1)")


@dataclass(frozen=True)
class LoraConfig(_Config):
    """Low-rank adapters: see lora.py."""

    _label: ClassVar[str] = "lora"

    rank: int = 8
    alpha: float = 16.0  # over rank, it scales what an adapter adds

    def _check(self) -> None:
        self._require(self.rank >= 1, "rank", "it must be at least 1")
        self._require(self.alpha > 0, "alpha", "it must be above 0")


@dataclass(frozen=True)
class MeshConfig(_Config):
    """Over how many processes a run is spread, and how; see distributed.py."""

    _label: ClassVar[str] = "mesh"

    data: int = 1  # sequences are dealt out
    expert: int = 1  # sequences are dealt out, and experts
    context: int = 1  # tokens of each sequence are dealt out
    tensor: int = 1  # heads of each mixer and channels of each MLP are dealt out

    @property
    def processes(self) -> int:
        return self.data * self.expert * self.context * self.tensor

    def _check(self) -> None:
        for name in ("data", "expert", "context", "tensor"):
            self._require(getattr(self, name) >= 1, name, "it must be at least 1")


@dataclass(frozen=True)
class SamplingConfig(_Config):
    """How text is drawn. Temperature 0 takes the most likely token; `top_k` 0 and `top_p` 1 leave nothing out."""

    _label: ClassVar[str] = "sampling"

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None  # None: every call draws anew
    stop: tuple[str, ...] = ()  # the text ends before the first of these

    def _check(self) -> None:
        self._require(self.max_new_tokens >= 1, "max_new_tokens", "it must be at least 1")
        self._require(0 <= self.temperature <= 100, "temperature", "it must be in [0, 100]")
        self._require(self.top_k >= 0, "top_k", "it must not be negative")
        self._require(0 < self.top_p <= 1, "top_p", "it must be in (0, 1]")
        self._require(self.seed is None or 0 <= self.seed < 2**63, "seed", "it must be in [0, 2**63)")
        self._require("" not in self.stop, "stop", "an empty stop text would end everything at once")
