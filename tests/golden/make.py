"""Writes losses.json: the first 20 training losses of every tiny preset. Run it only when a change of numbers is meant.

python tests/golden/make.py
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

import palimpsest as pal

FILE = Path(__file__).with_name("losses.json")
STEPS, BATCH, TOKENS = 20, 2, 40


def batches() -> torch.Tensor:
    """Token ids [STEPS, BATCH, TOKENS] by integer arithmetic: structure to learn, and no random numbers."""
    t = torch.arange(STEPS * BATCH * TOKENS)
    ids = t % 5 * 50 + t // 40 % 3 * 7
    return ids.view(STEPS, BATCH, TOKENS)


def losses(preset: str) -> list[float]:
    """Float32 losses before each of 20 AdamW steps at 1e-3, from seed 0."""
    torch.manual_seed(0)
    model = pal.Model(pal.ModelConfig.preset(preset))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    found = []
    for ids in batches():
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss
        assert loss is not None
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


def main() -> None:
    torch.set_num_threads(1)
    table = {name: [round(x, 7) for x in losses(name)] for name in pal.presets() if name.endswith("-tiny")}
    lines = [f"  {json.dumps(name)}: {json.dumps(values)}" for name, values in table.items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
