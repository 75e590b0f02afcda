"""The recall benchmark: its models, a cell's training, resumption, verdicts, and the page they end in."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import palimpsest as pal
from palimpsest import lineage, ops
from palimpsest.cli import main
from palimpsest.recall import cells, claims, findings, models, runner
from palimpsest.recall import training as work
from palimpsest.recall.cells import Cell
from palimpsest.report import write_recall
from palimpsest.state import Segments
from palimpsest.tasks import MQAR, Palindrome, Stack
from tests.conftest import blocks_of, relative
from tests.test_report import make_results, render

CPU = torch.device("cpu")
EASY = Palindrome(2, 4)


def cell(**changes: Any) -> Cell:
    tests: dict[str, Any] = {str(EASY.length): EASY}
    easy = Cell("learning", "kda", "palindrome5", (EASY,), tests, tuple(tests), 16, 8, 1e-2, 0, 16, 300, 20, 64)
    return replace(easy, **changes)


# The models.


@pytest.mark.parametrize("mixer", models.MIXERS)
def test_models_differ_in_their_memory_only(mixer: str) -> None:
    model = models.build(mixer, 50, 32, 16, 0)
    out = model(torch.randint(50, (2, 20)))
    assert out.logits.isfinite().all()
    config = model.config
    assert (config.hidden_size, config.num_hidden_layers, config.intermediate_size) == (32, 2, 64)
    other = models.build("deltanet", 50, 32, 16, 0)
    names = {name for name, _ in model.named_parameters() if ".mixer." not in name}
    assert names == {name for name, _ in other.named_parameters() if ".mixer." not in name}
    recurrent = out.state.num_bytes("recurrent")
    assert recurrent == {"softmax": 0, "hybrid": 2 * 2048, "linear": 2 * 2 * 2 * 16 * 17 * 4}.get(
        mixer, 2 * 2 * 2 * 16 * 16 * 4
    )


def test_decay_without_delta_is_the_loop() -> None:
    """S = exp(g) S + k (beta v)^T with Gated DeltaNet's own weights."""
    model, twin = models.build("decay", 50, 32, 16, 3), models.build("gdn", 50, 32, 16, 3)
    for (name, mine), (_, other) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        assert torch.equal(mine, other), name
    mixer = blocks_of(model.double())[0].mixer
    x = torch.randn(1, 7, 32, dtype=torch.float64)
    q, k, v = (torch.randn(1, 7, 2, 16, dtype=torch.float64) for _ in range(3))
    state = torch.zeros(1, 2, 16, 16, dtype=torch.float64)
    o, final = mixer.remember(x, q, k, v, state, Segments((0,), (7,), None, CPU))
    g = -mixer.A_log.double().exp() * F.softplus(mixer.a_proj(x) + mixer.dt_bias.double())
    beta = mixer.b_proj(x).sigmoid()
    unit_q, unit_k = ops.l2norm(q), ops.l2norm(k)
    for head in range(2):
        s = torch.zeros(16, 16, dtype=torch.float64)
        for t in range(7):
            s = g[0, t, head].exp() * s + torch.outer(unit_k[0, t, head], beta[0, t, head] * v[0, t, head])
            assert relative(o[0, t, head], s.T @ unit_q[0, t, head] / 4) < 1e-10
        assert relative(final[0, head], s) < 1e-10


def test_softmax_behind_a_convolution_reads_whole_rows_only() -> None:
    model = models.build("softmax", 50, 32, 16, 0)
    ids = torch.randint(50, (1, 9))
    before = model(ids).logits
    with torch.no_grad():
        blocks_of(model)[0].mixer.conv1d.weight[:, 0] += 1
    assert not torch.allclose(model(ids).logits[:, 5:], before[:, 5:])
    with pytest.raises(ValueError, match="reads whole rows only"):
        model(ids, state=model(ids).state)


# One cell.


def test_the_loss_is_that_of_the_scored_ids() -> None:
    task = Stack(10, 3, 4)
    training = work.Training(cell(train=(task,), test={"stack": task}, probe=("stack",)), CPU)
    ids, labels = task.batch(16, torch.Generator().manual_seed(1))
    at, targets = work.scored_positions(labels, task.most_scored)
    assert int((targets == -100).sum()) > 0, "rows have different numbers of pops"
    expected = training.model(ids, labels=labels).loss
    assert relative(training._loss(ids, at, targets), expected) < 1e-6
    reader = work.Training(cell(train=(task,), test={"stack": task}, probe=("stack",), text_weight=0.5), CPU)
    text = reader.model(ids, labels=ids).loss
    assert relative(reader._loss(ids, at, targets), expected + 0.5 * text) < 1e-6


def test_a_cell_is_learned_and_says_when() -> None:
    training = work.Training(cell(), CPU)
    row = work.run(training)
    assert row["status"] == "solved" and row["steps"] < 300 and row["probe_accuracy"] > 0.95
    first = next(point["step"] for point in row["curve"] if point["accuracy"] >= 0.9)
    assert row["steps_to_90"] == first and row["curve"][0]["step"] == 20
    assert row["tokens"] == row["steps"] * 16 * 5
    assert row["parameters"] == training.model.num_parameters()
    assert row["state_context"] == 5 and row["state_bytes"] == training.model(torch.zeros(1, 5).long()).state.num_bytes()
    assert row["tests"]["5"]["chance"] == pytest.approx(1 / 3)
    again = work.run(work.Training(cell(), CPU))
    assert again == row, "the seed decides everything"
    other = work.run(work.Training(cell(seed=1, steps=20), CPU))
    assert other["curve"] != row["curve"][:1] and other["status"] == "finished" and other["steps_to_90"] is None


def test_a_cell_that_diverges_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work.Training, "last_loss", lambda _: math.nan)
    row = work.run(work.Training(cell(), CPU))
    assert row["status"] == "diverged" and row["steps"] == 20
    assert json.loads(json.dumps(row))["curve"][0]["loss"] is None


def test_tasks_take_turns_and_rows_never_come_twice() -> None:
    training = work.Training(cell(train=(EASY, EASY, MQAR(16, 2, 16))), CPU)
    seen: list[tuple[int, ...]] = []
    for step in range(240):
        task = training.cell.train[step % 3]
        rows = training._rows(task)
        assert rows[0].shape == (16, task.length) and rows[1].shape == rows[2].shape == (16, task.most_scored)
        if task is not EASY:
            seen += [tuple(row) for row in rows[0].tolist()]
    assert len(set(seen)) == len(seen)


class Pretend:
    """A CUDA graph as far as a CPU can have one: recording runs a step and takes it back, replaying runs it on what is held."""

    training: work.Training

    @contextlib.contextmanager
    def record(self) -> Iterator[None]:
        before = [copy.deepcopy(x.state_dict()) for x in (self.training.model, self.training.optimizer)]
        yield
        self.training.model.load_state_dict(before[0])
        self.training.optimizer.load_state_dict(before[1])

    def replay(self) -> None:
        held, loss = next((rows, loss) for graph, rows, loss in self.training.recorded.values() if graph is self)
        loss.copy_(self.training._update(held))


def test_a_recorded_step_is_the_step_as_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    two = cell(train=(EASY, Palindrome(3, 4)))
    plain, recorded = work.Training(two, CPU), work.Training(two, CPU)
    monkeypatch.setattr(Pretend, "training", recorded, raising=False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Pretend)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **_: graph.record())
    recorded.refusal = ""
    plain.advance(20)
    recorded.advance(20)
    assert len(recorded.recorded) == 2 and plain.recorded == {}
    assert recorded.last_loss() == plain.last_loss()
    for mine, other in zip(recorded.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_where_recording_fails_the_step_runs_as_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise RuntimeError("operation not permitted\nmore")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", refuse)
    plain, recorded = work.Training(cell(), CPU), work.Training(cell(), CPU)
    recorded.refusal = ""
    plain.advance(10)
    recorded.advance(10)
    assert recorded.refusal == "operation not permitted" and recorded.last_loss() == plain.last_loss()


# Many cells.


def quick(folder: Path, chosen: list[Cell], **options: Any) -> tuple[list[dict[str, Any]], list[str]]:
    said: list[str] = []
    return runner.run(chosen, folder, CPU, {"commit": "c"}, say=said.append, **options), said


def test_cells_side_by_side_are_cells_alone_and_a_stopped_run_goes_on(tmp_path: Path) -> None:
    chosen = [cell(seed=seed, steps=40) for seed in range(3)]
    rows, _ = quick(tmp_path / "one", chosen[:1])
    before = (tmp_path / "one/learning.jsonl").read_text()
    more, said = quick(tmp_path / "one", chosen)
    assert (tmp_path / "one/learning.jsonl").read_text().startswith(before) and len(more) == 2
    assert said[0].startswith("[2/3] learning/palindrome5-kda-w16-lr0.01-n40-s1: ") and "40 steps, accuracy " in said[0]
    together, _ = quick(tmp_path / "two", chosen, together=3)
    for mine, other in zip([*rows, *more], together, strict=True):
        for key in ("cell", "curve", "accuracy", "tests", "steps", "settings", "commit"):
            assert mine[key] == other[key]
    assert runner.read(tmp_path / "two") == together
    assert runner.missing(chosen, together) == [] and quick(tmp_path / "two", chosen)[0] == []


def test_no_cell_begins_after_the_minutes(tmp_path: Path) -> None:
    chosen = [cell(seed=seed, steps=40) for seed in range(2)]
    rows, said = quick(tmp_path, chosen, minutes=1e-9)
    assert rows == [] and said == ["2 of 2 cells not run; the same command goes on with them"]
    left = runner.not_run(chosen, rows)
    assert [row["status"] for row in left] == ["not run", "not run"] and left[1]["seed"] == 1


def test_a_cell_that_fails_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    advance = work.Training.advance

    def faulty(self: work.Training, steps: int) -> None:
        if self.cell.seed == 0:
            raise torch.OutOfMemoryError("out of memory\ndetails")
        advance(self, steps)

    monkeypatch.setattr(work.Training, "advance", faulty)
    rows, said = quick(tmp_path, [cell(seed=seed, steps=20) for seed in range(2)], together=2)
    assert [row["seed"] for row in rows] == [1]
    assert said[0] == "learning/palindrome5-kda-w16-lr0.01-n20-s0: failed: out of memory" and said[-1].startswith("1 of 2")


def test_lines_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    quick(tmp_path, [cell(steps=20)])
    with pytest.raises(pal.InputError, match="was run with other batch_size; give another --out, or remove its line"):
        quick(tmp_path, [cell(steps=20, batch_size=8)])
    path = tmp_path / "learning.jsonl"
    whole = path.read_bytes()
    for line, what in ((b'{"cell": ', "not JSON"), (b"\xff", "not JSON"), (9999 * b"[", "not JSON"), (b"{}", "no cell's row")):
        path.write_bytes(whole + line)
        with pytest.raises(pal.InputError, match=f"learning.jsonl: line 2 is {what}; remove it"):
            runner.read(tmp_path)


def test_what_is_run() -> None:
    full, small = cells.full(), cells.small()
    for plan in (full, small):
        assert len({each.name for each in plan}) == len(plan)
        assert [name for name in dict.fromkeys(each.experiment for each in plan)] == list(cells.EXPERIMENTS)
        for each in plan:
            assert set(each.probe) <= set(each.test) and each.width % each.head_dim == 0 and each.steps % each.every == 0
    frontier = [each for each in full if each.experiment == "frontier"]
    assert len(frontier) == 6 * 2 * 2 * 3 and {each.seed for each in frontier[:24]} == {0}
    assert {(task.length, task.most_scored) for task in frontier[0].train} == {
        (64, 4),
        (128, 8),
        (256, 16),
        (256, 32),
        (256, 64),
    }
    learning = {(each.task, each.mixer) for each in full if each.experiment == "learning"}
    assert {task for task, _ in learning} == {f"{t}{n}" for t, n in (("palindrome", 255), ("recall", 253), ("stack", 255))} | {
        "palindrome1023",
        "recall1021",
        "stack1023",
    }
    assert {mixer for _, mixer in learning} == {"kda", "gdn", "deltanet", "decay"}
    assert len(cells.select(full, "frontier/*kda*-s0,needles/*")) == 4 + 24
    with pytest.raises(
        pal.InputError, match=r"cells: 'frontier/\*rwkv\*' matches no cell; names look like 'frontier/mqar-softmax"
    ):
        cells.select(full, "frontier/*rwkv*")
    assert {(each.steps, each.every) for each in cells.with_steps(frontier, 2000)} == {(2000, 100)}
    assert {each.steps for each in cells.shortened(frontier, 0.52)} == {2000}
    assert {each.steps for each in cells.shortened(frontier, 1e-9)} == {200}
    assert "text" in repr(cells.full(b"a text " * 900)[-1].test["S2 4096"]) and cells.full()[-1].vocab_size == 332


def test_steps_that_fit_the_minutes() -> None:
    chosen = [cell(seed=seed, steps=400) for seed in range(3)]
    assert runner.fitting(chosen, 1000.0, CPU) == 1.0
    share = runner.fitting(chosen, 0.01, CPU)
    assert 0 < share < 0.5 and runner.fitting(chosen * 10, 0.01, CPU) < share / 4


# Verdicts.


@pytest.mark.parametrize(
    ("better", "worse", "said"),
    [
        ([0.9, 0.91, 0.92], [0.5, 0.52, 0.51], "reproduced"),
        ([0.5, 0.52, 0.51], [0.9, 0.91, 0.92], "not reproduced"),
        ([0.9, 0.5, 0.7], [0.6, 0.65, 0.62], "not resolvable at this size"),
        ([0.905, 0.905], [0.9, 0.9], "not resolvable at this size"),
        ([0.9], [0.1], "not resolvable at this size"),
        ([], [0.1, 0.2], "not run"),
    ],
)
def test_verdicts_on_accuracy(better: list[float], worse: list[float], said: str) -> None:
    assert claims.verdict(better, worse)[0] == said


def test_verdicts_on_steps() -> None:
    never = math.inf
    assert claims.verdict([100, 200], [300, never], True)[0] == "reproduced"
    assert claims.verdict([300, never], [100, 200], True)[0] == "not reproduced"
    assert claims.verdict([100, 400], [300, never], True)[0] == "not resolvable at this size"
    assert claims.verdict([never, never], [never, never], True)[0] == "not resolvable at this size"
    assert claims.verdict([100], [never], True)[0] == "not resolvable at this size"


def row(experiment: str, mixer: str, seed: int, **changes: Any) -> dict[str, Any]:
    made = {
        "cell": f"{experiment}/{mixer}-{seed}-{changes.get('learning_rate')}-{changes.get('width')}",
        "experiment": experiment,
        "mixer": mixer,
        "task": "mqar",
        "width": 64,
        "learning_rate": 0.003,
        "seed": seed,
        "status": "finished",
        "steps": 100,
        "steps_to_90": None,
        "accuracy": 0.5,
        "probe_accuracy": 0.5,
        "tests": {"64 x 4": {"accuracy": 0.5, "rows": 0.1, "chance": 0.1}},
        "curve": [{"step": 50, "accuracy": 0.2, "loss": 1.0}, {"step": 100, "accuracy": 0.5, "loss": 0.5}],
        "parameters": 1000,
        "state_bytes": 4096,
        "state_context": 64,
        "tokens_per_s": 1e6,
        "settings": {"budget_steps": 100},
    }
    return made | changes


def needle(mixer: str, seed: int, **found: float) -> dict[str, Any]:
    tests = {name.replace("_", " "): {"accuracy": value, "rows": value, "chance": 0.1} for name, value in found.items()}
    return row("needles", mixer, seed, task="niah", tests=tests)


def some_rows() -> list[dict[str, Any]]:
    rows = [row("frontier", "softmax", s, accuracy=0.991 + s / 500, state_bytes=65536) for s in range(2)]
    rows += [row("frontier", "deltanet", s, accuracy=0.7 + s / 100, probe_accuracy=0.7) for s in range(2)]
    rows += [row("frontier", "deltanet", s, accuracy=0.2, probe_accuracy=0.2, learning_rate=0.01) for s in range(2)]
    rows += [row("frontier", "deltanet", s, accuracy=0.95, width=128, state_bytes=16384) for s in range(2)]
    rows += [row("frontier", "gdn", s, accuracy=0.7 + s / 100) for s in range(2)]
    rows += [row("learning", "kda", s, task="palindrome255", steps_to_90=1000 + s, accuracy=0.95) for s in range(2)]
    rows += [row("learning", "gdn", s, task="palindrome255", steps_to_90=None if s else 500) for s in range(2)]
    rows += [needle("deltanet", s, S1_128=0.9 + s / 50, S2_128=0.2, S1_256=0.9, S2_256=0.1) for s in range(2)]
    rows += [needle("gdn", s, S1_128=0.95, S2_128=0.9 + s / 50, S1_256=0.9, S2_256=0.5) for s in range(2)]
    rows += [needle("decay", s, S1_128=0.9, S2_128=0.1 + s / 50, S1_256=0.95, S2_256=0.1) for s in range(2)]
    return rows


def test_published_claims_are_judged_by_our_runs() -> None:
    found = {each["claim"]: each for each in claims.judged(some_rows())}
    said = {claim: each["verdict"] for claim, each in found.items()}
    assert said["Softmax recalls more than a small delta memory"] == "reproduced"
    assert said["A larger delta memory recalls more"] == "reproduced"
    assert (
        said["Gated DeltaNet recalls more than DeltaNet (its published state is twice as large)"]
        == "not resolvable at this size"
    )
    assert said["KDA learns the palindrome sooner than Gated DeltaNet"] == "not resolvable at this size"
    assert said["KDA learns recall sooner than Gated DeltaNet"] == "not run"
    assert said["Gated DeltaNet learns the palindrome sooner than decay without delta"] == "not run"
    assert said["Delta alone finds a needle in repeated noise and loses it in text"] == "reproduced"
    assert said["In text, decay alone finds more than delta alone"] == "not reproduced"
    assert said["In repeated noise, delta alone finds more than decay alone"] == "not reproduced"
    narrow = [each for each in some_rows() if each["width"] == 64]
    alone = {each["claim"]: each["verdict"] for each in claims.judged(narrow)}
    assert alone["A larger delta memory recalls more"] == "not run", "there is one width"
    ours = found["Softmax recalls more than a small delta memory"]["ours"]
    assert ours == "99.1 %, 99.3 % (softmax, width 64) against 70.0 %, 71.0 % (deltanet, width 64)"
    assert "1,000, 1,001 (kda, length 255) against 500, never (gdn, length 255)" in [each["ours"] for each in found.values()]


def test_the_best_rate_is_that_of_all_seeds_and_of_the_largest_budget() -> None:
    rows = [
        row("learning", "kda", s, task="t", steps_to_90=n, learning_rate=r)
        for s, n, r in [(0, 50, 1), (1, None, 1), (0, 90, 2)]
    ]
    rows.append(row("learning", "kda", 1, task="t", steps_to_90=95, learning_rate=2))
    assert {each["learning_rate"] for each in claims.best(rows, "learning", "kda", "t")} == {2}
    rows.append(row("learning", "kda", 0, task="t", learning_rate=3, settings={"budget_steps": 200}))
    assert {each["learning_rate"] for each in claims.best(rows, "learning", "kda", "t")} == {3}
    assert claims.best(rows, "learning", "gdn") == []


def test_the_page(tmp_path: Path) -> None:
    rows = some_rows() + runner.not_run([cell(mixer="decay")], [])
    write_recall(rows, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.count('<svg class="plot"') == 3 and "not run" in page and "20 of 21 cells were run" in page
    frontier, palindrome, *_ = findings.plots(rows)
    assert "Most accurate: softmax attention, 99.2 %" in frontier.finding
    assert "Least memory above 90 %: DeltaNet with 16 KiB." in frontier.finding
    assert points_of(frontier, "DeltaNet") == [(4096.0, pytest.approx(0.705)), (16384.0, 0.95)]
    assert "KDA (1,000)" in palindrome.finding and "Gated DeltaNet" in palindrome.finding
    empty = findings.plots(runner.not_run(cells.small(), []))
    assert all("Nothing was run." in plot.finding for plot in empty) and len(empty) == 5
    write_recall(runner.not_run(cells.small(), []), tmp_path / "empty.html")


def test_a_lineages_report_has_the_tasks_when_they_were_run(tmp_path: Path) -> None:
    without, _ = render(make_results(), tmp_path)
    page, _ = render({**make_results(), "tasks": some_rows()}, tmp_path)
    assert page.count('<svg class="plot"') == without.count('<svg class="plot"') + 3
    assert "What others found, and we" in page and "What others found" not in without
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(set(ids)) == len(ids)


def points_of(plot: Any, name: str) -> list[tuple[float, float]]:
    (line,) = [line for line in plot.panels[0].lines if line.name == name]
    return line.points


# The commands.


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cells, "small", lambda text=b"": [cell(seed=seed) for seed in range(2)])
    assert main(["benchmark", "recall", "--steps", "15", "--cells", "*-s1", "--report", "page.html"]) == 0
    assert "[1/1] learning/palindrome5-kda-w16-lr0.01-n15-s1: finished after 15 steps" in capsys.readouterr().out
    (line,) = Path("runs/recall/learning.jsonl").read_text().splitlines()
    found = json.loads(line)
    assert found["settings"]["budget_steps"] == 15 and found["machine"]["processor"] and found["version"] == pal.__version__
    assert Path("page.html").exists()
    assert main(["benchmark", "recall", "--steps", "15", "--list"]) == 0
    assert [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()] == ["not run", "done"]
    for wrong, words in (
        (["--minutes", "0"], "--minutes is 0"),
        (["--cells", "x"], "'x' matches no cell"),
        (["--text", "absent.txt"], "absent.txt"),
        (["--report", "absent/page.html"], "absent/page.html"),
    ):
        assert main(["benchmark", "recall", *wrong]) == 2
        assert words in capsys.readouterr().err


def test_a_lineage_adds_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(pal.InputError, match="tasks: 'needle' is not one; did you mean 'needles'"):
        lineage._cells(["needle"])
    assert len(lineage._cells(["all"])) == len(cells.small()) and lineage._cells(None) == []
    assert {each.experiment for each in lineage._cells(["needles", "learning"])} == {"needles", "learning"}
    assert lineage._remember([], tmp_path / "tasks") == []
    monkeypatch.setattr(runner, "fitting", lambda chosen, minutes, device: 0.1)
    rows = lineage._remember([cell(seed=seed) for seed in range(2)], tmp_path / "tasks")
    assert [row["settings"]["budget_steps"] for row in rows] == [20, 20]
    monkeypatch.setattr(runner, "fitting", lambda chosen, minutes, device: pytest.fail("measured once"))
    assert lineage._remember([cell(seed=seed) for seed in range(2)], tmp_path / "tasks") == rows
    assert lineage._remember([], tmp_path / "tasks") == rows
