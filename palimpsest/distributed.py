"""One run on many processes, started by torchrun, with torch's own means: FSDP2, DTensor and process groups.

    [mesh]
    data = 2        # sequences of a batch are dealt out
    expert = 2      # so they are here; besides, each process holds a part of the experts and rows travel to them
    context = 1     # the tokens of a sequence are dealt out, in equal stretches (context.py)
    tensor = 1      # the heads of mixers and the channels of MLPs are dealt out (heads.py)

Their product is the number of processes. Every weight but the routers' bias is cut over data x expert x context, and gathered
for the sublayer that needs it (FSDP); experts are first cut over `expert`, then over the others, and maps to and from heads and
channels first over `tensor`, where they stay cut while they work. Gradients are sums over the
processes of shares of one mean over all predicted tokens, so that a step is the same step on any mesh.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from palimpsest import lora
from palimpsest.checkpoint import fill
from palimpsest.config import LINEAR_MIXERS, InputError, MeshConfig, TrainConfig
from palimpsest.context import Context, all_gather
from palimpsest.heads import Heads
from palimpsest.mixers import MLA, Attention
from palimpsest.mlps import GELU, GatedMLP
from palimpsest.model import Model
from palimpsest.moe import Experts, MoE, Router

FROM_HEADS = ("o_proj", "down_proj")  # maps that all heads, or all channels of an MLP, go into
WHOLE = ("q_a_proj", "kv_a_proj_with_mqa", "f_a_proj", "g_a_proj")  # into low ranks, which all heads share


@dataclass(frozen=True)
class World:
    """This process' place among those of a run; alone by default."""

    sizes: MeshConfig
    device: torch.device
    rank: int = 0
    mesh: Any = None  # a DeviceMesh with the dimensions data, context, expert, tensor; None when alone

    @property
    def size(self) -> int:
        return self.sizes.processes

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and speaks to the user."""
        return self.rank == 0

    @property
    def batch_parts(self) -> int:
        """Into how many parts the sequences of a batch are dealt."""
        return self.sizes.data * self.sizes.expert

    @property
    def batch_part(self) -> int:
        return 0 if self.mesh is None else self._at("data") * self.sizes.expert + self._at("expert")

    def _at(self, dimension: str) -> int:
        return self.mesh.get_local_rank(dimension)

    def rows(self, ids: Tensor) -> Tensor:
        """This process' sequences of a batch [B,T]; none when there are fewer than processes."""
        return ids.tensor_split(self.batch_parts)[self.batch_part]

    def summed(self, *values: float) -> list[float]:
        """The sums over all processes, in float64."""
        if self.mesh is None:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.tolist()

    def wait(self) -> None:
        """Until every process is here."""
        if self.mesh is not None:
            dist.barrier()

    def check(self, config: TrainConfig, model: Model) -> None:
        """Raises InputError when a batch, a sequence or the experts cannot be dealt out."""
        for field, value, parts in (
            ("batch_size", config.batch_size, self.batch_parts),
            ("context_length", config.context_length, self.sizes.context),
        ):
            if value % parts:
                raise InputError(f"train: {field} is {value}; on this mesh it must be a multiple of {parts}")
        if config.compile and self.size > 1:
            raise InputError("train: compile is true; on several processes leave it false")
        if self.sizes.context > 1 and config.context_length // self.sizes.context < model.config.linear_conv_kernel_dim:
            least = self.sizes.context * model.config.linear_conv_kernel_dim
            raise InputError(f"train: context_length is {config.context_length}; on this mesh it must be at least {least}")
        if self.sizes.expert > 1 and ("moe" not in model.config.mlps or model.config.num_experts % self.sizes.expert):
            held = model.config.num_experts if "moe" in model.config.mlps else 0
            raise InputError(f"mesh: expert is {self.sizes.expert}; it must divide the model's number of experts, {held}")
        if self.sizes.tensor > 1:
            _check_heads(self.sizes.tensor, config, model)


def alone(device: torch.device | None = None) -> World:
    return World(MeshConfig(), device or torch.device("cpu"))


def is_main() -> bool:
    """Whether this is the first process of a torchrun, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def start(sizes: MeshConfig | None) -> World:
    """Joins the processes that torchrun started; without it this process is alone. `sizes` None is data = their number.

    Raises InputError when their number is another than the mesh asks for.
    """
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    sizes = MeshConfig(data=launched) if sizes is None else sizes
    if sizes.processes != launched:
        have = f"there are {launched}" if "WORLD_SIZE" in os.environ else "this is one, started by itself"
        command = f"torchrun --nproc-per-node {sizes.processes} -m palimpsest train ..."
        raise InputError(
            f"mesh: data x expert x context x tensor is {sizes.processes} processes; {have}: start it with {command}"
        )
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if has_gpu else torch.device("cpu")
    if launched == 1:
        return World(sizes, device)
    if has_gpu:
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if has_gpu else "gloo")
    return join(sizes, device)


def join(sizes: MeshConfig, device: torch.device) -> World:
    """The world of processes that have a process group already."""
    from torch.distributed.device_mesh import init_device_mesh

    shape = sizes.data, sizes.context, sizes.expert, sizes.tensor
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("data", "context", "expert", "tensor"))
    return World(sizes, device, dist.get_rank(), mesh)


def meet() -> None:
    """Waits for all processes of the run: one that left early would close connections that others still read."""
    if dist.is_available() and dist.is_initialized():
        dist.barrier()


def leave() -> None:
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


# ------------------------------------------------------------------------------------------------------------------- weights


def spread(model: Model, world: World) -> Model:
    """The same model, in place, with its weights cut over the processes; all must hold equal ones. `model.loss` is then of
    this process' sequences and tokens."""
    if world.mesh is None:
        return model
    from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
    from torch.distributed.tensor import Shard, distribute_tensor

    # Outputs are views here, and nothing is added to them in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    if world.sizes.tensor > 1:
        _split(model, world.mesh["tensor"])
    everyone = world.mesh["data", "context", "expert"]._flatten("all")
    others = world.mesh["data", "context"]._flatten("replicas")
    # The bias that chooses experts has no gradient: each process moves its own in the same way.
    kept: Any = {module.e_score_correction_bias for module in model.modules() if isinstance(module, Router)}
    units: list[tuple[nn.Module, Any]] = []
    for block in model.layers:
        units.append((block.mixer, everyone))  # type: ignore[arg-type]
        if isinstance(block.mlp, MoE) and isinstance(block.mlp.experts, Experts):
            experts = block.mlp.experts
            if world.sizes.expert > 1:
                for name, weight in list(experts.named_parameters()):
                    cut = distribute_tensor(weight.data, world.mesh["expert"], [Shard(0)], src_data_rank=None)
                    experts.register_parameter(name, nn.Parameter(cut, requires_grad=weight.requires_grad))
                experts.exchange = Exchange(world.mesh.get_group("expert"), world.sizes.expert)
            units.append((experts, others if world.sizes.expert > 1 else everyone))
        units.append((block.mlp, everyone))  # type: ignore[arg-type]
    for module, mesh in [*units, (model, everyone)]:
        sharded = fully_shard(module, mesh=mesh, ignored_params=kept)
        assert isinstance(sharded, FSDPModule)
        sharded.set_gradient_divide_factor(1.0)  # sums: the loss is divided already
        sharded.set_force_sum_reduction_for_comms(True)
    register_fsdp_forward_method(model, "loss")
    if world.sizes.context > 1:
        model.context = Context(world.mesh.get_group("context"), world.mesh.get_local_rank("context"), world.sizes.context)
    return model


def _split(model: Model, mesh: Any) -> None:
    """Deals out the heads of all mixers, and the channels of dense MLPs and shared experts. Routed experts stay whole."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    parts, heads = mesh.size(), Heads(mesh.get_group(), mesh.get_local_rank(), mesh.size())
    for block in model.layers:
        mixer: Any = block.mixer
        mixer.parallel = heads
        for name in ("heads", "kv_heads", "key_heads", "value_heads"):
            if hasattr(mixer, name):
                setattr(mixer, name, getattr(mixer, name) // parts)
        for module in [mixer, *(m for m in block.mlp.modules() if isinstance(m, GELU | GatedMLP))]:  # type: ignore[union-attr]
            maps = [name for name, each in module.named_children() if isinstance(each, nn.Linear) and name not in WHOLE]
            plan: Any = {name: RowwiseParallel() if name in FROM_HEADS else ColwiseParallel() for name in maps}
            parallelize_module(module, mesh, plan, src_data_rank=None)


def _check_heads(parts: int, config: TrainConfig, model: Model) -> None:
    """Raises InputError when the heads and channels of a model cannot be dealt out to `parts` processes."""
    own = model.config
    fields = ["num_attention_heads"] if any(isinstance(block.mixer, Attention | MLA) for block in model.layers) else []
    fields += ["num_key_value_heads"] if "attention" in own.mixers else []
    fields += ["linear_num_key_heads", "linear_num_value_heads"] if set(own.mixers) & set(LINEAR_MIXERS) else []
    fields += ["intermediate_size"] if set(own.mlps) - {"moe"} else []
    fields += ["moe_intermediate_size"] if "moe" in own.mlps and own.num_shared_experts else []
    for field in fields:
        if getattr(own, field) % parts:
            raise InputError(f"mesh: tensor is {parts}; it must divide the model's {field}, {getattr(own, field)}")
    for refused, what in (
        (config.qk_clip > 0, "qk_clip"),
        (lora.config_of(model) is not None, "adapters"),
        ("linear_attention" in own.mixers and own.linear_feature_map == "product", "linear_feature_map 'product'"),
    ):
        if refused:
            raise InputError(f"mesh: tensor is {parts}; with {what} the heads cannot be dealt out: leave it 1")


def whole(model: Model, world: World) -> Model:
    """A model of its own with the gathered weights, on the CPU; the model itself when alone. Every process must call it."""
    if world.mesh is None:
        return model
    with torch.device("meta"):
        other = Model(model.config)
    other.to(model.embed_tokens.weight.dtype)
    adapters = lora.config_of(model)
    if adapters is not None:
        lora.add(other, adapters)
    fill(other, {name: full(parameter.detach()).cpu() for name, parameter in model.named_parameters()})
    return other


def full(x: Tensor) -> Tensor:
    """All of a tensor of which this process holds a part; the tensor itself when it holds all."""
    if not is_cut(x):
        return x
    parts = local(x)
    for mesh_dim, dim, total in reversed(_cuts(x)):
        mesh = x.device_mesh  # type: ignore[attr-defined]
        rows = parts.movedim(dim, 0)
        places = mesh.shape[mesh_dim]
        longest = -(-total // places)
        padded = rows.new_zeros(longest, *rows.shape[1:])
        padded[: len(rows)] = rows
        rows = rows.new_empty(places * longest, *rows.shape[1:])
        all_gather(rows, padded, group=mesh.get_group(mesh_dim))
        parts = rows[:total].movedim(0, dim)
    return parts.contiguous()


def _cuts(x: Tensor) -> list[tuple[int, int, int]]:
    """How a tensor was cut, in order: (the dimension of its mesh, its own dimension, the length that was cut there). The last
    dimension of a mesh comes first. Parts are equal, but for the last ones where it does not divide."""
    sizes, found = list(x.shape), []
    mesh, placements = x.device_mesh, x.placements  # type: ignore[attr-defined]
    for mesh_dim in reversed(range(len(mesh.shape))):
        if placements[mesh_dim].is_replicate():
            continue
        dim = placements[mesh_dim].dim
        found.append((mesh_dim, dim, sizes[dim]))
        sizes[dim] = _cut(sizes[dim], mesh, mesh_dim)[1]
    return found


def copies(x: Tensor) -> float:
    """How many processes hold each value of a tensor; 1 when it is not cut."""
    if not is_cut(x):
        return 1.0
    return dist.get_world_size() / math.prod(x.device_mesh.shape[mesh_dim] for mesh_dim, *_ in _cuts(x))  # type: ignore[attr-defined]


def _cut(total: int, mesh: Any, dimension: int) -> tuple[int, int]:
    """(where this process' part of `total` rows begins, how long it is): equal parts, the last ones shorter or empty."""
    longest = -(-total // mesh.shape[dimension])
    start = min(mesh.get_local_rank(dimension) * longest, total)
    return start, min(longest, total - start)


def part_of(x: Tensor, like: Tensor) -> Tensor:
    """Of a whole tensor, what this process holds of `like`; x itself when it holds all."""
    if not is_cut(like):
        return x
    for mesh_dim, dim, total in _cuts(like):
        start, length = _cut(total, like.device_mesh, mesh_dim)  # type: ignore[attr-defined]
        x = x.narrow(dim, start, length)
    return x


def as_like(x: Tensor, like: Tensor) -> Tensor:
    """A whole tensor, cut as `like` is."""
    if not is_cut(like):
        return x
    return joined(part_of(x, like).contiguous(), like)


def joined(part: Tensor, like: Tensor) -> Tensor:
    """This process' part as a tensor that is cut as `like` is; the part itself when `like` is not."""
    if not is_cut(like):
        return part
    from torch.distributed.tensor import DTensor

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())


def local(x: Tensor) -> Tensor:
    """The part that this process holds, sharing its memory."""
    return x.to_local() if is_cut(x) else x  # type: ignore[attr-defined]


def is_cut(x: Tensor) -> bool:
    return hasattr(x, "device_mesh")


# ------------------------------------------------------------------------------------------------------------------- experts


class Exchange:
    """Rows travel to the processes that hold their experts, and back."""

    def __init__(self, group: Any, size: int) -> None:
        self.group, self.size = group, size

    def __call__(self, rows: Tensor, counts: Tensor, work: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """rows [N,R] sorted by expert, counts [E] of all experts; `work` takes rows of this process' experts and their counts.
        Returns what `work`, here or there, made of the rows, in their order."""
        leaving = counts.view(self.size, -1)
        coming = torch.empty_like(leaving)
        dist.all_to_all_single(coming, leaving, group=self.group)
        sent, received = leaving.sum(1).tolist(), coming.sum(1).tolist()
        arrived = _Travel.apply(rows, received, sent, self.group)
        # They lie by sender and then by expert; the product wants them by expert.
        experts = torch.arange(coming.shape[1], device=rows.device).repeat(self.size)
        order = torch.repeat_interleave(experts, coming.flatten(), output_size=sum(received)).argsort(stable=True)
        done = work(arrived[order], coming.sum(0))
        return _Travel.apply(done[order.argsort()], sent, received, self.group)


class _Travel(torch.autograd.Function):
    """all_to_all of rows; the gradient travels back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, received: list[int], sent: list[int], group: Any) -> Tensor:
        ctx.received, ctx.sent, ctx.group = received, sent, group
        out = x.new_empty(sum(received), x.shape[1])
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        out = grads[0].new_empty(sum(ctx.sent), grads[0].shape[1])
        dist.all_to_all_single(out, grads[0].contiguous(), ctx.sent, ctx.received, group=ctx.group)
        return out, None, None, None
