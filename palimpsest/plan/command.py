"""`palimpsest plan`: what is asked on the command line, answered as text, JSON and HTML."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from palimpsest.config import InputError
from palimpsest.output import Json, check_file, write_json
from palimpsest.plan import Plan, page, table
from palimpsest.plan import fit as fitting
from palimpsest.plan import plan as make
from palimpsest.plan.claims import claims as published
from palimpsest.plan.units import span


def plan(
    model: str | None = None,
    /,
    *,
    context: str | None = None,
    batch: int = 1,
    device: str = "h200",
    devices: int = 1,
    dtype: str | None = None,
    optimizer: str = "adamw",
    recompute: Annotated[bool, Parameter(negative="")] = False,
    accumulation: int = 1,
    sharding: str = "none",
    chunk: int = 64,
    compare: str | None = None,
    sweep: str | None = None,
    fit: str | None = None,
    claims: Annotated[bool, Parameter(negative="")] = False,
    html: Path | None = None,
    json: Json = None,
) -> None:
    """Say what a model costs before anybody builds it: parameters, memory, operations, times.

    Parameters
    ----------
    model
        A preset, a folder or file of ours, or a published config.json.
    context
        Tokens of each sequence, such as 8192, 128k or 1M (8k when left out).
    batch
        Sequences over all devices.
    device
        h200, h100, a100, rtx-4090, or a file that `palimpsest benchmark calibrate` wrote.
    devices
        How many of them.
    dtype
        f32, bf16, f16 or mxfp4 (packed experts); by default as the model is published.
    optimizer
        adamw or muon, for the memory of training.
    recompute
        Sublayers run again in the backward pass.
    accumulation
        Micro-batches of a training step.
    sharding
        What training cuts over the devices: none, optimizer, gradients, weights.
    chunk
        Tokens that a recurrent layer works on together, 1 to 256.
    compare
        More models, separated by commas, side by side.
    sweep
        context=1k..1M: memory and times at doubled contexts.
    fit
        A size such as 24GiB: the largest batch, context and preset that fit into it.
    claims
        Published figures beside ours.
    html
        Also write a page with plots.
    """
    check_file(json)
    check_file(html, "--html")
    settings: dict[str, Any] = {"batch": batch, "device": device, "num_devices": devices, "dtype": dtype}
    settings |= {
        "optimizer": optimizer,
        "recompute": recompute,
        "accumulation": accumulation,
        "sharding": sharding,
        "chunk": chunk,
    }
    settings |= {} if context is None else {"context": context}
    write_json(json, answer(model, compare, sweep, fit, claims, html, settings))


def answer(
    model: str | None,
    compare: str | None,
    sweep: str | None,
    room: str | None,
    with_claims: bool,
    html: Path | None,
    how: dict[str, Any],
) -> dict[str, Any]:
    """Prints the answers and returns them, ready for JSON. `how` are the settings of `palimpsest.plan`."""
    names = [name for name in (model, *_listed(compare)) if name is not None]
    if not names and not with_claims:
        raise InputError("plan: no model was given; name a preset or a config.json, or ask for --claims")
    contexts = _contexts(sweep)
    how = {"context": contexts[-1], **how} if contexts else how
    plans = [make(name, **how) for name in dict.fromkeys(names)]
    found: dict[str, Any] = {"plans": [each.as_dict() for each in plans]}
    texts = [table.render(plans[0])] if len(plans) == 1 else [table.compare(plans)] if plans else []
    if contexts:
        _check_reach(plans, contexts)
        found["sweep"] = table.sweep_rows(plans, contexts)
        texts.append(table.sweep(found["sweep"]))
    if room is not None:
        found["fit"] = [{"model": each.name, **fitting(room, each)} for each in plans]
        texts += [table.fit(each, row) for each, row in zip(plans, found["fit"], strict=True)]
    if with_claims:
        found["claims"] = published()
        texts.append(table.claims(found["claims"]))
    if html is not None:
        page.write(plans, found.get("sweep") or _default_sweep(plans), found.get("claims", []), html)
    print("\n\n".join(texts))
    return found


def _listed(names: str | None) -> list[str]:
    if names is None:
        return []
    found = [name.strip() for name in names.split(",")]
    if "" in found:
        raise InputError(f"plan: compare is {names!r}; write names separated by commas")
    return found


def _contexts(sweep: str | None) -> list[int]:
    if sweep is None:
        return []
    field, equals, value = sweep.partition("=")
    if field != "context" or not equals:
        raise InputError(f"plan: sweep is {sweep!r}; write context=1k..1M")
    return span("sweep", value)


def _check_reach(plans: list[Plan], contexts: list[int]) -> None:
    for each in plans:
        limit = each.config.max_position_embeddings
        if each.config.position == "learned" and contexts[-1] > limit:
            raise InputError(f"plan: sweep reaches {contexts[-1]} tokens; {each.name}'s position table ends at {limit}")


def _default_sweep(plans: list[Plan]) -> list[dict[str, Any]]:
    """Contexts for the plots of a page that asked for none: doubled up to the plan's own."""
    if not plans:
        return []
    longest = min(each.context for each in plans)
    contexts = [longest >> shift for shift in reversed(range(11)) if longest >> shift >= 16]
    return table.sweep_rows(plans, contexts)
