"""Puts the figures of recorded runs of `palimpsest benchmark serve` (serve*.json here) into docs/serving.md: `make figures`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "serving.md"
BEGIN, END = "<!-- figures: written by `make figures` -->", "<!-- end of figures -->"


def render(runs: dict[str, dict[str, Any]]) -> str:
    """The page's block, from the contents of the files by name."""
    lines: list[str] = []
    for name, run in sorted(runs.items()):
        machine = run["machine"]
        where = f"{machine.get('processor')}, {machine.get('threads')} threads, torch {machine.get('torch')}"
        lines += [f"`benchmarks/{name}`: {where}, {run['created'][:10]}.", ""]
        for model, rates in run["rates"].items():
            lines += [*_rates(model, rates), ""]
        for model, beside in run.get("llama_cpp", {}).items():
            lines += [*_beside(model, beside), ""]
        soak = run.get("soak", {})
        if "requests" in soak:
            growth = f"resident memory of the second half {100 * soak['resident_growth']:+.1f} % on the first"
            lines += [
                f"{soak['clients']} clients for {soak['seconds']:g} s: {soak['requests']} requests, "
                f"{soak['number_wrong']} answered wrongly, {growth}.",
                "",
            ]
    return "\n".join([BEGIN, "", *(lines or ["No run is recorded.", ""]), END])


def _rates(model: str, rates: dict[str, Any]) -> list[str]:
    first = rates["first_token"]
    return [
        f"{model}: prompts of {rates['prompt_tokens']} tokens, {rates['drawn_tokens']} drawn, median of {rates['repeats']}.",
        "",
        "| requests at a time | tokens/s | lowest | highest |",
        "|---|---|---|---|",
        *(
            f"| {row['concurrent']} | {row['tokens_per_s']:.1f} | {row['lowest']:.1f} | {row['highest']:.1f} |"
            for row in rates["throughput"]
        ),
        "",
        f"First token of a prompt of {first['prompt_tokens']} tokens: {first['cold_s']:.3f} s; "
        f"with {first['cached_tokens']} of them remembered {first['remembered_s']:.4f} s.",
    ]


def _beside(model: str, beside: dict[str, Any]) -> list[str]:
    if "skipped" in beside:
        return [f"{model} beside llama.cpp: left out, {beside['skipped']}."]
    lines = [
        f"{model} beside llama.cpp's parallel decoding:",
        "",
        "| weights | requests at a time | tokens/s | llama.cpp | ratio |",
        "|---|---|---|---|---|",
    ]
    for dtype, rows in beside.items():
        for row in rows:
            ours, theirs = row["tokens_per_s"]["median"], row["llama_cpp_tokens_per_s"]["median"]
            lines.append(f"| {dtype} | {row['concurrent']} | {ours:.1f} | {theirs:.1f} | {row['ratio']:.2f} |")
    return lines


def recorded() -> dict[str, dict[str, Any]]:
    return {path.name: json.loads(path.read_text(encoding="utf-8")) for path in (ROOT / "benchmarks").glob("serve*.json")}


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    PAGE.write_text(before + render(recorded()) + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
