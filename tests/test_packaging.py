"""The package as others meet it: its metadata, its wheel, its size, its README, and what importing it drags in."""

import importlib.metadata
import itertools
import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import palimpsest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

# Installed with the package or an extra of it, but not needed to import it, build a model and run it.
OPTIONAL = ["tokenizers", "cyclopts", "rich", "matplotlib", "transformers", "triton", "fastapi", "pyarrow", "pydantic"]
OPTIONAL += ["uvicorn", "openai", "llguidance"]
GENERATED = {"runs", "dist", "build", "__pycache__"}


def project_files() -> Iterator[Path]:
    """Every file of the project that is not generated: no caches, environments or runs."""
    folders = [ROOT]
    while folders:
        for path in sorted(folders.pop().iterdir()):
            if path.is_file() and path.suffix != ".so":
                yield path
            elif path.is_dir() and (path.name == ".ci" or not (path.name.startswith(".") or path.name in GENERATED)):
                folders.append(path)


def readme_blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def test_version_is_that_of_the_installed_distribution() -> None:
    assert importlib.metadata.version("palimpsest-lm") == palimpsest.__version__


def test_files_stay_short() -> None:
    lengths = {
        path.relative_to(ROOT).as_posix(): len(path.read_text(encoding="utf-8").splitlines())
        for path in project_files()
        if path.is_relative_to(ROOT / "palimpsest")
    }
    assert "palimpsest/config.py" in lengths
    limit = {name: 800 if name.startswith("palimpsest/ops/") else 400 for name in lengths}
    assert {name: lines for name, lines in lengths.items() if lines > limit[name]} == {}


def test_nothing_names_a_machine_path_or_a_registry_host() -> None:
    paths = re.compile(rb"(?<![\w.])/(?:work|home|root|Users|mnt|opt|tmp|farm)/\w")
    hosts = re.compile(rb"\b(?:pypi\.org|pythonhosted\.org|npmjs\.(?:org|com)|debian\.org|download\.pytorch\.org)\b")
    contents = {path.relative_to(ROOT).as_posix(): path.read_bytes() for path in project_files()}
    found = {
        name: match[0]
        for name, content in contents.items()
        if b"\0" not in content
        for match in [*paths.finditer(content), *hosts.finditer(content)]
    }
    assert "README.md" in contents and ".ci/run" in contents
    assert found == {}


def test_the_makefile_installs_pinned_versions() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {Requirement(line).name.lower() for line in lines if re.fullmatch(r"[\w.-]+==[\w.]+", line)}
    extras = PROJECT["optional-dependencies"]
    wanted = [*PROJECT["dependencies"], *extras["dev"], *extras["demo"], *extras["report"]]
    names = {Requirement(text).name.lower() for text in wanted} - {"palimpsest-lm", "torch"}
    assert names - pinned == set()


def test_wheel_holds_the_package_and_only_the_package(tmp_path: Path) -> None:
    code = "import sys; from hatchling.build import build_wheel; build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    # With a compiler the wheel is this machine's; without one it is anybody's.
    compiled = [name for name in names if name.endswith(".so")]
    ending = wheel.name.removeprefix(f"palimpsest_lm-{palimpsest.__version__}-")
    assert (ending == "py3-none-any.whl") == (not compiled)
    ours = {path.relative_to(ROOT).as_posix() for path in project_files() if path.is_relative_to(ROOT / "palimpsest")}
    assert any(name.endswith(".css") for name in ours)
    assert {name for name in names if ".dist-info/" not in name} - set(compiled) == ours


def test_the_core_runs_without_the_optional_packages() -> None:
    code = f"""
import sys
sys.modules.update(dict.fromkeys({OPTIONAL!r}))  # None: importing one of them fails
import palimpsest as pal, torch
model = pal.Model(pal.ModelConfig.preset("kimi-k3-tiny", vocab_size=64))
out = model(torch.arange(10).view(1, 10))
assert out.logits.shape == (1, 10, 64) and out.state.num_bytes() > 0
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_readme_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = readme_blocks("python")
    assert len(blocks) >= 2
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)  # later blocks may use what earlier ones made


def readme_commands() -> list[str]:
    lines = [line for block in readme_blocks("sh") for line in block.splitlines()]
    return [line for line in lines if line.startswith("palimpsest ")]


@pytest.mark.parametrize("line", readme_commands(), ids=lambda line: line.split()[1])
def test_readme_commands_parse(line: str) -> None:
    from palimpsest.cli import app

    _, *tokens = shlex.split(line, comments=True)
    app.parse_args(tokens, print_error=False, exit_on_error=False)


def test_readme_shows_each_command_and_each_preset() -> None:
    shown = {line.split()[1] for line in readme_commands()}
    commands = "lineage tokenize train evaluate generate convert plan benchmark presets doctor report serve chat"
    assert shown == set(commands.split())
    assert [name for name in palimpsest.presets() if f"`{name}`" not in README] == []


def test_readme_tree_is_the_tree() -> None:
    (tree,) = [block for block in readme_blocks("text") if "palimpsest/" in block]
    folders: list[str] = []
    listed: set[str] = set()
    for line in tree.splitlines():
        names = list(itertools.takewhile(lambda word: "." in word or word.endswith("/"), line.split()))
        folders = folders[: (len(line) - len(line.lstrip())) // 2]
        listed |= {"/".join([*folders, name.rstrip("/")]) for name in names}
        if names[-1].endswith("/"):
            folders.append(names[-1].rstrip("/"))
    assert [name for name in listed if not (ROOT / name).exists()] == []
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "palimpsest").glob("**/*.py")}
    assert {name for name in modules if not name.endswith("__.py")} - listed == set()
