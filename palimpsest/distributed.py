"""One run on many processes, started by torchrun, with torch's own means: FSDP2, DTensor and process groups.

    [mesh]
    data = 2        # sequences of a batch are dealt out
    expert = 2      # so they are here; besides, each process holds a part of the experts and rows travel to them
    context = 1     # the tokens of a sequence are dealt out, in equal stretches (context.py)

data x expert x context is the number of processes. Every weight but the routers' bias is cut over all of them, and gathered
for the sublayer that needs it (FSDP); experts are first cut over `expert`, then over the others. Gradients are sums over the
processes of shares of one mean over all predicted tokens, so that a step is the same step on any mesh.
"""

from __future__ import annotations

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
from palimpsest.config import InputError, MeshConfig, TrainConfig
from palimpsest.context import Context, all_gather
from palimpsest.model import Model
from palimpsest.moe import Experts, MoE, Router


@dataclass(frozen=True)
class World:
    """This process' place among those of a run; alone by default."""

    sizes: MeshConfig
    device: torch.device
    rank: int = 0
    mesh: Any = None  # a DeviceMesh with the dimensions data, context, expert; None when alone

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
        raise InputError(f"mesh: data x expert x context is {sizes.processes} processes; {have}: start it with {command}")
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

    shape = sizes.data, sizes.context, sizes.expert
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("data", "context", "expert"))
    return World(sizes, device, dist.get_rank(), mesh)


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
    mesh, parts = x.device_mesh, local(x)  # type: ignore[attr-defined]
    # The last dimension of a mesh was cut first, so it is joined last. The last parts are shorter where it does not divide.
    totals = [len(x)]
    for dimension in reversed(range(1, len(mesh.shape))):
        totals.insert(0, _cut(totals[0], mesh, dimension)[1])
    for dimension, total in enumerate(totals):
        places = mesh.shape[dimension]
        longest = -(-total // places)
        padded = parts.new_zeros(longest, *parts.shape[1:])
        padded[: len(parts)] = parts
        parts = parts.new_empty(places * longest, *parts.shape[1:])
        all_gather(parts, padded, group=mesh.get_group(dimension))
        parts = parts[:total]
    return parts


def _cut(total: int, mesh: Any, dimension: int) -> tuple[int, int]:
    """(where this process' part of `total` rows begins, how long it is): equal parts, the last ones shorter or empty."""
    longest = -(-total // mesh.shape[dimension])
    start = min(mesh.get_local_rank(dimension) * longest, total)
    return start, min(longest, total - start)


def part_of(x: Tensor, like: Tensor) -> Tensor:
    """Of a whole tensor, what this process holds of `like`; x itself when it holds all."""
    if not is_cut(like):
        return x
    mesh = like.device_mesh  # type: ignore[attr-defined]
    for dimension in reversed(range(len(mesh.shape))):
        start, length = _cut(len(x), mesh, dimension)
        x = x[start : start + length]
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
