"""The report on synthetic results: self-contained, honest about what is missing, and following the data when it turns."""

import importlib.util
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest import mock

import matplotlib
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palimpsest import plots
from palimpsest.config import InputError
from palimpsest.findings import all_plots, listed
from palimpsest.report import write_report

STAGES = {
    "gpt2": "GPT-2: softmax attention",
    "linear-attention": "Linear attention",
    "deltanet": "DeltaNet: the delta rule",
    "gated-deltanet": "Gated DeltaNet: learned forgetting",
    "kda": "Kimi Delta Attention: forgetting per channel",
    "kimi-linear": "Kimi Linear: three KDA layers to one of MLA",
    "hybrid-latent-moe": "Hybrid with latent experts",
    "kimi-k3": "Kimi K3: attention over depth",
}
CONTEXTS = [16, 64, 256, 1023]


def make_stage(index: int, name: str) -> dict[str, Any]:
    """A stage that is a little better than the one before; only gpt2 and the hybrids have memory that grows."""
    final = 2.6 - 0.04 * index
    kept = {0: 1024}.get(index, 96 if index > 4 else 0)
    fixed = 0 if index == 0 else 65536
    tokens = [100_000 * i for i in range(1, 7)]
    losses = [final + 1.4 / i - 1.4 / 6 for i in range(1, 7)]
    recall = {n: max(0.03, 0.95 - 0.04 * n / (index + 1)) for n in (2, 4, 8, 16, 24)}
    return {
        "name": name,
        "title": STAGES[name],
        "memory": f"The first sentence on {name}. The second sentence on {name}.",
        "ok": True,
        "error": None,
        "config": {"hidden_size": 128, "mixers": [name, name, "mla"], "gate_lower_bound": None, "norm": f"rms{index // 4}"},
        "parameters": 1_512_345 + index,
        "active_parameters": 804_352 + 1000 * index,
        "tokens_seen": 600_000,
        "seconds": 95.25 + index,
        "tokens_per_second": 600_000 / (95.25 + index),
        "val_bits_per_byte": final,
        "val_curve": [{"tokens": t, "bits_per_byte": b} for t, b in zip(tokens, losses, strict=True)],
        "train_curve": [{"tokens": t, "nats_per_token": 1.5 * b} for t, b in zip(tokens, losses, strict=True)],
        "recall": [{"pairs": n, "accuracy": accuracy} for n, accuracy in recall.items()],
        "recall_chance": 1 / 32,
        "recall_steps": 300,
        "recall_curve": [{"step": 75 * i, "accuracy": 0.2 * i} for i in range(1, 5)],
        "state_bytes": [
            {"context": t, "bytes": kept * t + fixed + 1536, "kv": kept * t, "recurrent": fixed, "conv": 1536} for t in CONTEXTS
        ],
        "decode_ms": [{"context": t, "ms": 1.5 + 0.2 * index + (kept and t / 400)} for t in CONTEXTS],
        "position_bits": [{"start": 2**i + 1, "end": 2 ** (i + 1), "bits_per_byte": final + 1.2 * 0.6**i} for i in range(8)],
        "sample": {"prompt": "KING HENRY ", "text": "speaks to the lord\nand of the crown. " * 6},
    }


def make_results() -> dict[str, Any]:
    def errors(n: int, factor: float) -> dict[str, float]:
        additive = factor * math.sqrt(n / 64)
        return {"pairs": n, "additive": additive, "delta": additive / 2, "gated": additive / 1.5, "per_channel": additive / 1.8}

    pairs = [1, 2, 4, 8, 16, 32, 64, 128]
    overwrite = {"additive": (0.99, 1.01), "delta": (0.0, 1.4), "gated": (0.0, 1.4), "per_channel": (0.1, 1.3)}
    return {
        "format": 1,
        "version": "0.1.0",
        "created": "2026-01-02T03:04:05Z",
        "command": "palimpsest lineage --minutes 8",
        "commit": None,
        "machine": {
            "processor": "Example CPU 3.0 GHz",
            "threads": 2,
            "memory_bytes": 6 * 2**30,
            "platform": "Linux x86_64",
            "torch": "2.13.0",
            "python": "3.11.9",
        },
        "text": {
            "source": "the plays",
            "bytes": 5_400_000,
            "train_bytes": 5_000_000,
            "validation_bytes": 400_000,
            "unigram_bits_per_byte": 4.62,
            "vocab_size": 512,
            "bytes_per_token": 1.93,
        },
        "budget": {
            "minutes": 8.0,
            "tokens": 600_000,
            "steps": 586,
            "batch_size": 4,
            "context_length": 256,
            "seconds_used": 455.5,
        },
        "stages": [make_stage(index, name) for index, name in enumerate(STAGES)],
        "readout": {
            "key_dim": 64,
            "value_dim": 64,
            "cosine": 0.5,
            "random": [errors(n, 1.0) for n in pairs],
            "correlated": [errors(n, 4.0) for n in pairs],
            "overwrite": [{"memory": m, "error_new": a, "error_old": b} for m, (a, b) in overwrite.items()],
            "gate": "log decay -0.01 a step",
        },
        "chunk_sweep": {
            "tokens": 2048,
            "heads": 4,
            "key_dim": 64,
            "value_dim": 64,
            "rows": [
                {
                    "chunk": c,
                    "flops_per_token_per_head": 24576 + 640 * c,
                    "ms": 20 + 400 / c + c / 8,
                    "tokens_per_second": 2048e3 / (20 + 400 / c + c / 8),
                }
                for c in (8, 16, 32, 64, 128, 256)
            ],
        },
        "scale_card": {
            "parameters": 2_779_484_476_000,
            "active_parameters": 104_189_612_640,
            "gpt2_parameters": 124_439_808,
            "size_ratio": 22335.97,
            "kv_bytes_per_token": 27_648,
            "recurrent_state_bytes": 434_110_464,
            "source": "counted",
        },
    }


VOID = {"meta", "path", "use", "polygon", "rect", "br", "link", "img"}


@dataclass
class Element:
    tag: str
    attributes: dict[str, str]
    children: "list[Element | str]" = field(default_factory=list)

    def all(self, tag: str = "", **attributes: str) -> "list[Element]":
        """Descendants in document order, by tag and by attributes (`class_` for class)."""
        wanted = {name.rstrip("_"): value for name, value in attributes.items()}
        found = []
        for child in self.children:
            if isinstance(child, Element):
                if tag in ("", child.tag) and wanted.items() <= child.attributes.items():
                    found.append(child)
                found += child.all(tag, **attributes)
        return found

    @property
    def text(self) -> str:
        return "".join(child if isinstance(child, str) else child.text for child in self.children)


class Tree(HTMLParser):
    """The page as a tree; tags that do not match are an error."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open = [Element("", {})]
        self.feed(page)
        self.close()
        assert [element.tag for element in self.open] == [""]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs)
        element = Element(tag, {name: value or "" for name, value in attrs})
        self.open[-1].children.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open[-1].children.append(Element(tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        assert self.open.pop().tag == tag

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


def render(results: dict[str, Any], folder: Path) -> tuple[str, Element]:
    write_report(results, folder / "report.html")
    page = (folder / "report.html").read_text(encoding="utf-8")
    return page, Tree(page).open[0]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Element]:
    return render(make_results(), tmp_path_factory.mktemp("report"))


def findings(results: dict[str, Any]) -> dict[str, str]:
    return {plot.ident: plot.finding for plot in all_plots(results)}


# The page.


def test_the_page_refers_to_nothing_outside_itself(page: tuple[str, Element]) -> None:
    text, root = page
    elements = root.all()
    assert not {"script", "link", "img", "iframe", "object", "image"} & {element.tag for element in elements}
    for element in elements:
        for name, value in element.attributes.items():
            assert "://" not in value, (name, value)
            assert name not in ("src", "srcset", "xlink:href", "action") and not name.startswith("on")
            assert name != "href" or value.startswith("#")
    assert re.findall(r"@import|@font-face|https?:|url\((?!#)", text) == []


def test_ids_are_unique_and_references_resolve(page: tuple[str, Element]) -> None:
    text, root = page
    ids = [element.attributes["id"] for element in root.all() if "id" in element.attributes]
    assert len(ids) == len(set(ids))
    references = re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', text)
    assert len(references) > 100
    assert {a or b for a, b in references} <= set(ids)


def test_each_plot_is_a_question_a_drawing_an_answer_and_a_table(page: tuple[str, Element]) -> None:
    _, root = page
    sections = [section for section in root.all("section") if section.all("svg", role="img")]
    assert [s.attributes["id"] for s in sections] == [plot.ident for plot in all_plots(make_results())]
    assert len(sections) == 8
    for section in sections:
        order = [(e.tag, e.attributes.get("class")) for e in section.children if isinstance(e, Element)]
        assert order == [("h2", None), ("p", "machine"), ("figure", None), ("p", "finding"), ("details", None)]
        (heading,), (machine, *_), (svg,) = section.all("h2"), section.all("p"), section.all("svg", role="img")
        assert heading.text.endswith("?")
        assert machine.text.startswith("Measured on Example CPU 3.0 GHz, 2 threads, 6 GiB of memory")
        assert heading.text in svg.attributes["aria-label"] and " against " in svg.attributes["aria-label"]
        assert len(section.all("table")) == 1 and "open" in section.all("details")[0].attributes


def test_every_axis_has_a_unit() -> None:
    for plot in all_plots(make_results()):
        for panel in plot.panels:
            for label in (panel.x_label, panel.y_label):
                assert re.search(r"\(.+\)", label) or panel.categories, label


def test_the_page_can_be_read_aloud(page: tuple[str, Element]) -> None:
    _, root = page
    assert root.all("html")[0].attributes["lang"] == "en"
    levels = [int(element.tag[1]) for element in root.all() if re.fullmatch("h[1-6]", element.tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in zip(levels, levels[1:], strict=False))
    for table in root.all("table"):
        assert len(table.all("caption")) == 1
        assert {cell.attributes["scope"] for cell in table.all("th")} == {"col", "row"}
        columns = len(table.all("thead")[0].all("th"))
        for row in table.all("tbody")[0].all("tr"):
            assert sum(int(c.attributes.get("colspan", 1)) for c in [*row.all("th"), *row.all("td")]) == columns
    for svg in root.all("svg"):
        assert svg.attributes.get("role") == "img" or svg.attributes.get("aria-hidden") == "true"


def test_lines_differ_in_colour_dashes_and_marker(page: tuple[str, Element]) -> None:
    _, root = page
    (section,) = [s for s in root.all("section", id="memory")]
    samples = [item.all("svg")[0] for item in section.all("li")]
    assert len(samples) == 8
    paths, markers = [x.all("path")[0] for x in samples], [x.all("polygon")[0] for x in samples]
    for what in (
        [path.attributes["style"].split("dasharray:")[1] for path in paths],
        [m.attributes["points"] for m in markers],
    ):
        assert len(set(what)) == 8
    assert len({re.findall(r"--s\d", path.attributes["style"])[0] for path in paths}) == 8


def themes() -> list[dict[str, str]]:
    css = (Path(plots.__file__).parent / "report.css").read_text(encoding="utf-8")
    blocks = re.findall(r":root \{(.*?)\}", css, flags=re.DOTALL)
    return [dict(re.findall(r"--(\w+): #(\w+);", block)) for block in blocks]


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colours as WCAG 2 defines it."""

    def luminance(colour: str) -> float:
        full = colour if len(colour) == 6 else "".join(2 * digit for digit in colour)
        parts = [int(full[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_both_themes_and_paper_define_every_colour_with_enough_contrast(page: tuple[str, Element]) -> None:
    text, _ = page
    assert "#fe0" not in text  # a placeholder that was left in a drawing
    light, dark, paper = themes()
    used = set(re.findall(r"var\(--(\w+)\)", text))
    assert {f"s{i}" for i in range(8)} < used
    for theme in (light, dark, paper):
        assert used <= set(theme)
        for name in ("ink", "muted", "failed", "link"):
            assert contrast(theme[name], theme["paper"]) >= 4.5 and contrast(theme[name], theme["raised"]) >= 4.5
        for i in range(8):
            assert contrast(theme[f"s{i}"], theme["paper"]) >= 3


def test_numbers_are_for_people_with_the_exact_value_behind_them(page: tuple[str, Element]) -> None:
    _, root = page
    shown = {cell.text: cell.attributes.get("title") for cell in root.all("section", id="stages")[0].all("td")}
    assert shown["1.51 M"] == "1,512,352" and shown["804.4 k"] == "804,352" and shown["1 min 35 s"] == "95.25"
    tiles = [(tile.text, tile.attributes["title"]) for tile in root.all("ul", class_="card")[0].all("strong")]
    assert ("2.78 T", "2779484476000") in tiles and ("414 MiB", "434110464") in tiles
    assert {text for text, _ in tiles} >= {"104.2 B", "22,336", "27,648"}


def test_no_figure_of_the_scale_card_is_typed(tmp_path: Path) -> None:
    results = make_results()
    results["scale_card"] = {key: 3 for key in results["scale_card"]}
    with mock.patch.object(plots, "svg", return_value=""):
        text, _ = render(results, tmp_path)
    for figure in ("2.78", "2,779", "104.2", "124.4", "22,3", "27,648", "434,110", "414 MiB"):
        assert figure not in text


def test_writing_twice_gives_the_same_bytes_and_leaves_matplotlib_alone(page: tuple[str, Element], tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    again, _ = render(make_results(), tmp_path)
    assert again == page[0]
    assert dict(matplotlib.rcParams) == before


# The sentences follow the data.


def turn_loss(results: dict[str, Any]) -> None:
    results["text"]["unigram_bits_per_byte"] = 2.55
    for stage, final in zip(results["stages"], (2.1, 2.2, 2.3, 2.4, 2.5, 2.6, 2.7, 2.8), strict=True):
        stage["val_bits_per_byte"] = stage["val_curve"][-1]["bits_per_byte"] = final
        stage["val_curve"][-2]["bits_per_byte"] = final - 0.1


def turn_recall(results: dict[str, Any]) -> None:
    for stage in results["stages"]:
        for row in stage["recall"]:
            row["accuracy"] = 0.11
    results["stages"][2]["recall"][0]["accuracy"] = 0.5


def turn_memory(results: dict[str, Any]) -> None:
    for stage in results["stages"]:
        growing = stage["name"] not in ("gpt2", "kimi-linear", "hybrid-latent-moe", "kimi-k3")
        for row in stage["state_bytes"]:
            row["bytes"] = 2048 * row["context"] if growing else 4096


def turn_decode(results: dict[str, Any]) -> None:
    for stage in results["stages"]:
        for row in stage["decode_ms"]:
            row["ms"] = 1.0 if stage["name"] == "gpt2" else 2.0 + row["context"] / 100


def turn_position(results: dict[str, Any]) -> None:
    for row in results["stages"][3]["position_bits"]:
        row["bits_per_byte"] = row["start"] / 100


def turn_readout(results: dict[str, Any]) -> None:
    for key in ("random", "correlated"):
        for row in results["readout"][key]:
            row["additive"], row["delta"] = row["delta"], row["additive"]


def turn_overwrite(results: dict[str, Any]) -> None:
    for row in results["readout"]["overwrite"]:
        row["error_new"], row["error_old"] = (0.1, 1.0) if row["memory"] == "additive" else (1.0, 1.0)


def turn_chunks(results: dict[str, Any]) -> None:
    for row in results["chunk_sweep"]["rows"]:
        row["ms"] = row["flops_per_token_per_head"] = 264 - row["chunk"]


@pytest.mark.parametrize(
    ("ident", "turn", "before", "after"),
    [
        (
            "loss",
            turn_loss,
            ["Lowest at the end: Kimi K3 with 2.320", "highest: GPT-2 with 2.600", "4.620: all 8.", "all 8; not falling: none"],
            [
                "Lowest at the end: GPT-2 with 2.100",
                "highest: Kimi K3 with 2.800",
                "2.550: GPT-2, Linear attention, DeltaNet, Gated DeltaNet and Kimi Delta Attention.",
                "none; not falling: all 8",
            ],
        ),
        (
            "recall",
            turn_recall,
            ["best on average: Kimi K3, 94 % right with 2 pairs and 83 % with 24", "Unsolved in this short run: none."],
            [
                "best on average: DeltaNet, 50 % right",
                "Unsolved in this short run: GPT-2, Linear attention, Gated DeltaNet, Kimi",
            ],
        ),
        (
            "memory",
            turn_memory,
            [
                "Constant at every context measured: Linear attention (65.5 KiB), DeltaNet (65.5 KiB), Gated",
                "Not constant: GPT-2 (grows by 1 KiB a token on average), Kimi Linear (grows by 96 B",
                "most is carried by GPT-2, 15.6 times",
            ],
            [
                "Constant at every context measured: GPT-2 (4 KiB), Kimi Linear (4 KiB), Hybrid",
                "Not constant: Linear attention (grows by 2 KiB a token",
                "most is carried by DeltaNet, Gated DeltaNet",
            ],
        ),
        (
            "decode",
            turn_decode,
            ["fastest: Linear attention (1.7 ms", "slowest: Kimi K3", "shortest context: GPT-2 (2.63 times), Kimi Linear"],
            ["fastest: GPT-2 (1 ms a token)", "shortest context: Linear attention (5.66 times)", "not so: GPT-2."],
        ),
        (
            "position",
            turn_position,
            ["Easier at the last positions (129–256) than at the first (2): all 8."],
            ["Kimi Delta Attention, Kimi Linear", "least: Gated DeltaNet (-1.270)"],
        ),
        (
            "readout",
            turn_readout,
            [
                "Random keys: with 128 pairs delta memory reads back best (error 0.71) and additive memory worst (1.41)",
                "below additive memory's at 8 of 8",
                "Correlated keys (cosine 0.5): with 128 pairs delta memory reads back best (error 2.83)",
            ],
            ["with 128 pairs additive memory reads back best (error 0.71) and delta memory worst", "at 0 of 8"],
        ),
        (
            "overwrite",
            turn_overwrite,
            ["half the old one's error by: delta, gated and per-channel gated; the old value still weighs in: additive."],
            ["half the old one's error by: additive; the old value still weighs in: delta, gated and per-channel gated."],
        ),
        (
            "chunks",
            turn_chunks,
            ["Least work: chunks of 8 tokens", "Fastest: chunks of 64 with 34.2 ms", "The least work is not the fastest."],
            ["Least work: chunks of 256", "Fastest: chunks of 256 with 8 ms", "The least work is also the fastest."],
        ),
    ],
)
def test_each_sentence_turns_with_the_data(
    ident: str, turn: Callable[[dict[str, Any]], None], before: list[str], after: list[str]
) -> None:
    results = make_results()
    first = findings(results)[ident]
    turn(results)
    second = findings(results)[ident]
    assert [part for part in before if part not in first] == [], first
    assert [part for part in after if part not in second] == [], second
    assert [part for part in before if part in second] == [] and [part for part in after if part in first] == []


def test_the_lead_turns_with_the_data(tmp_path: Path) -> None:
    def lead(results: dict[str, Any]) -> str:
        with mock.patch.object(plots, "svg", return_value=""):
            return render(results, tmp_path)[1].all("p", class_="lead")[0].text

    results = make_results()
    first = lead(results)
    assert "8 of 8 stages finished, each trained on 600 k tokens of the plays" in first
    assert "Kimi K3 predicts unseen text best, at 2.320 bits per byte; GPT-2 worst" in first
    assert "Better than GPT-2 (2.600): all 7." in first and "associative recall: all 8." in first
    assert "the most, 1 MiB, is carried by GPT-2." in first
    for turn in (turn_loss, turn_recall, turn_memory):
        turn(results)
    results["stages"][5]["tokens_seen"] = 300_000
    second = lead(results)
    assert "trained on different numbers of tokens (300 k to 600 k)" in second
    assert "GPT-2 predicts unseen text best, at 2.100 bits per byte; Kimi K3 worst" in second
    assert "Better than GPT-2 (2.100): none." in second and "associative recall: DeltaNet." in second
    assert "the least memory, 4 KiB, is carried by GPT-2, Kimi Linear" in second


def test_a_loss_above_the_frame_is_said_to_be_in_the_table() -> None:
    results = make_results()
    assert "top edge" not in findings(results)["loss"]
    results["stages"][0]["val_curve"][0]["bits_per_byte"] = 8.0
    assert "Values above the top edge are in the table only." in findings(results)["loss"]


# What fails, is missing or is hostile.


def test_a_failed_stage_is_shown_everywhere_and_breaks_nothing(tmp_path: Path) -> None:
    results = make_results()
    results["stages"][4] = {
        "name": "kda",
        "title": STAGES["kda"],
        "memory": "One. Two.",
        "config": {},
        "ok": False,
        "error": "RuntimeError: loss is <nan>",
    }
    with mock.patch.object(plots, "svg", return_value=""):
        _, root = render(results, tmp_path)
    assert root.all("p", class_="lead")[0].text.startswith("7 of 8 stages finished")
    for ident in ("stages", "loss", "recall", "memory", "decode", "position"):
        (section,) = root.all("section", id=ident)
        (row,) = [row for row in section.all("tr") if row.text.startswith("Kimi Delta Attention")]
        assert row.text == "Kimi Delta Attentionfailed: RuntimeError: loss is <nan>"
        assert ident == "stages" or "Failed, so not shown: Kimi Delta Attention." in section.all("p", class_="finding")[0].text
        assert len(section.all("tr")) == 9
        assert "Kimi Delta Attention" not in [item.text for item in section.all("li")]
    (own,) = root.all("section", id="stage-kda")
    assert own.all("h3")[0].text == STAGES["kda"] and "failed: RuntimeError" in own.text and "One. Two." in own.text


def test_what_was_not_measured_is_said_not_to_be(tmp_path: Path) -> None:
    _, root = render({"format": 1, "stages": [{"name": "kda", "ok": True}, {"name": "gpt2", "ok": False}]}, tmp_path)
    assert root.all("svg", role="img") == []
    for plot in all_plots(make_results()):
        (section,) = root.all("section", id=plot.ident)
        assert "not measured" in section.all("p", class_="finding")[0].text
        assert section.all("td", class_="unmeasured")
    assert "not measured" in root.all("section", id="scale")[0].text
    assert "failed: no reason recorded" in root.all("section", id="stage-gpt2")[0].text


def test_text_is_escaped_and_control_characters_are_pictured(tmp_path: Path) -> None:
    results = make_results()
    hostile = "<script>alert('x')</script>&amp;\"\x00\x1b 皇帝 \ud800 <b>"
    stage = results["stages"][1]
    stage["sample"] = {"prompt": hostile, "text": hostile}
    stage |= {"title": f"Linear{hostile}", "memory": hostile, "config": {hostile: [hostile, hostile]}}
    results["text"]["source"] = results["command"] = results["machine"]["processor"] = hostile
    results["stages"][2] |= {"ok": False, "error": hostile}
    with mock.patch.object(
        plots, "svg", side_effect=lambda ident, label, panels: f'<svg role="img" aria-label="{ident}"></svg>'
    ):
        page, root = render(results, tmp_path)
    assert root.all("script") == [] and "皇帝" in page and not re.search(r"[\x00-\x08\x0b-\x1f]", page)
    sample = root.all("section", id="stage-linear-attention")[0].all("pre")[0]
    expected = "<script>alert('x')</script>&amp;\"␀␛ 皇帝 ? <b>"
    assert sample.text == expected * 2 and [child.text for child in sample.all()] == [expected]


def test_text_in_drawings_is_escaped() -> None:
    line = plots.Line("</svg><script>", 0, [(1, 1), (2, 3)])
    panel = plots.Panel("</text><script>", "<script>", [line], str, str, references=[("<script>", 2)])
    drawing = Tree(plots.svg("x", '"><script>', [panel]) + plots.legend(panel)).open[0]
    assert drawing.all("script") == [] and len(drawing.all("svg")) == 2
    assert {"</text><script>", "<script>"} < {element.text for element in drawing.all("text")}


KEYS = [("stages", i, key) for i in (0, 1, 7) for key in make_stage(0, "gpt2") if key != "name"]
KEYS += [
    (part, key)
    for part in ("machine", "text", "budget", "readout", "chunk_sweep", "scale_card")
    for key in make_results()[part]
]
KEYS += [(key,) for key in make_results() if key not in ("format", "stages")]


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(KEYS), st.sampled_from(["absent", None, [], math.nan])), min_size=1, max_size=12))
def test_any_part_may_be_missing(tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[tuple[Any, ...], Any]]) -> None:
    results, whole = make_results(), make_results()
    for path, value in changes:
        owner: Any = results
        full: Any = whole
        for key in path[:-1]:
            owner = owner[key] if isinstance(key, int) or (isinstance(owner, dict) and key in owner) else None
            full = full[key]
        if isinstance(owner, dict):
            if value == "absent":
                owner.pop(path[-1], None)
            elif not (isinstance(value, float) and isinstance(full[path[-1]], dict | list)):
                owner[path[-1]] = value
    drawn = '<svg role="img" aria-label="x"></svg>'
    with mock.patch.object(plots, "svg", return_value=drawn):
        _, root = render(results, tmp_path_factory.getbasetemp())
    assert len(root.all("section", id="each")[0].all("h3")) == 8


def test_points_that_cannot_be_drawn_are_left_out() -> None:
    line = plots.Line("x", 0, [(0, 1), (1, 0), (2, 3)])
    panel = plots.Panel("x (n)", "y (n)", [line, plots.Line("y", 1, [(0, 0)])], str, str, y_scale="log")
    assert plots.drawable(panel).lines == [plots.Line("x", 0, [(2, 3)])]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"format": 2}, "results: format is 2; this version reads 1, run the lineage again"),
        ({"stages": []}, "results: stages is []; it must be a list of stages, run the lineage again"),
        ({"stages": None}, "results: stages is None; it must be a list of stages, run the lineage again"),
    ],
)
def test_results_of_another_kind_are_refused(changes: dict[str, Any], line: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="^" + re.escape(line) + "$"):
        write_report(make_results() | changes, tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    taken = tmp_path / "report.html"
    taken.mkdir()
    with mock.patch.object(plots, "svg", return_value=""):
        for path in (taken, tmp_path / "absent" / "report.html"):
            with pytest.raises(InputError, match=r"report\.html: cannot be written \(.+\); choose a folder you may write to$"):
                write_report(make_results(), path)
    assert list(tmp_path.iterdir()) == [taken]


def test_without_matplotlib_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("fresh_plots", plots.__file__)
    assert spec and spec.loader
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # importing it fails
    with pytest.raises(InputError, match=r"^report: matplotlib is not installed; install palimpsest-lm\[report\]$"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


# Words.


def test_numbers_as_words() -> None:
    assert [plots.count(n) for n in (0, 999, 9_999, 10_000, 1_500_000, 2_779_484_476_000)] == [
        *("0", "999", "9,999", "10 k"),
        *("1.5 M", "2.78 T"),
    ]
    assert [plots.size(n) for n in (0, 27_648, 434_110_464, -512)] == ["0 B", "27 KiB", "414 MiB", "-512 B"]
    assert [plots.percent(x) for x in (0, 1 / 32, 0.5, 1)] == ["0 %", "3.1 %", "50 %", "100 %"]
    assert [plots.duration(s) for s in (3.25, 59.7, 95.2)] == ["3.25 s", "1 min 0 s", "1 min 35 s"]
    assert [plots.finite(x) for x in (1, 0.5, None, math.nan, math.inf, "3")] == [1, 0.5, None, None, None, None]
    assert [plots.cell(x, plots.count) for x in (None, math.nan, 12_345)] == [*2 * ["not measured"], ("12.3 k", "12,345")]


def test_lists_as_words() -> None:
    assert [listed(names) for names in ([], ["a"], ["a", "b"], ["a", "b", "c"])] == ["none", "a", "a and b", "a, b and c"]
    assert listed(["a", "b"], 2) == "all 2" and listed(["a"], 1) == "a" and listed(["a", "b"], 3) == "a and b"
