"""Models and training runs on disk: safetensors and JSON, never pickle.

    model folder    config.json  model.safetensors  and, with a tokenizer, tokenizer.json  tokenizer_config.json
    checkpoint      a model folder with optimizer.safetensors and train_state.json
    run folder      run.json  metrics.jsonl  checkpoints/step-00000200/ ...

Everything is written under a temporary name, flushed to the disk and then renamed, so what carries its final name is
complete. `load` takes any of the three, from a run folder the newest checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from palimpsest.config import InputError, ModelConfig
from palimpsest.model import Model
from palimpsest.tokenizer import Tokenizer

FORMAT = "palimpsest"
CONFIG, WEIGHTS, OPTIMIZER, TRAIN_STATE = "config.json", "model.safetensors", "optimizer.safetensors", "train_state.json"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
TEMPORARY = ".palimpsest-tmp"  # ends the names of folders that are being written or removed


def save(model: Model, folder: str | Path, tokenizer: Tokenizer | None = None) -> None:
    """Writes a model folder. One that holds a model already gets the new one, and loses a tokenizer not given here.

    A tied head is saved once, with the embedding. Raises InputError, with nothing written, for a folder that holds
    something else, a tokenizer larger than the model's vocabulary, and a weight that is not finite.
    """
    folder = Path(folder).absolute()
    if (folder / CONFIG).exists() and read_json(folder / CONFIG).get("format") != FORMAT:
        raise InputError(f"{folder / CONFIG}: not written by palimpsest; give another folder")
    _check_savable(model, tokenizer)
    with staged(folder) as staging:
        _write_model(staging, model, tokenizer)
        flush_all(staging)
        if not folder.exists():
            staging.rename(folder)
        else:
            # Without config.json nothing loads, so it goes first and comes last: no moment shows parts of two models.
            (folder / CONFIG).unlink(missing_ok=True)
            for name in (WEIGHTS, *TOKENIZER, CONFIG):
                if (staging / name).exists():
                    os.replace(staging / name, folder / name)
                else:
                    (folder / name).unlink(missing_ok=True)
    flush(folder.parent)


def load(path: str | Path) -> tuple[Model, Tokenizer | None]:
    """The model and the tokenizer of a model folder, a checkpoint, or a run folder (its newest checkpoint).

    Weights keep the dtype of the file. Raises InputError, one line with the file, the tensor, what was expected and what
    was found, for a folder or file that is missing, truncated or does not fit its config.json, and for NaN or infinity.
    """
    folder = _model_folder(Path(path))
    config = _read_config(folder / CONFIG)
    with torch.device("meta"):
        model = Model(config)
    model.to(_weights_dtype(folder / WEIGHTS))
    tensors = _read_weights(folder / WEIGHTS, model)
    tokenizer = Tokenizer.from_file(folder) if (folder / TOKENIZER[0]).is_file() else None
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        raise InputError(
            f"{folder / TOKENIZER[0]}: ids reach {tokenizer.vocab_size - 1}; the model's vocabulary has "
            f"{config.vocab_size} entries; use the tokenizer it was trained with"
        )
    fill(model, tensors)
    return model, tokenizer


# -------------------------------------------------------------------------------------------------------------- checkpoints


def save_checkpoint(
    run: Path,
    step: int,
    model: Model,
    optimizer: Mapping[str, Tensor],
    state: dict[str, Any],
    tokenizer: Tokenizer | None,
    keep: int,
    always: int | None = None,
) -> Path:
    """Writes `run`/checkpoints/step-..., unless it is there, and removes all but the `keep` newest and that of step
    `always`; returns its path.

    Raises InputError as `save` does.
    """
    target = checkpoint_folder(run, step)
    if target not in checkpoints(run):
        _check_savable(model, tokenizer)
        with staged(target) as staging:
            _write_model(staging, model, tokenizer)
            save_file({name: tensor.contiguous() for name, tensor in optimizer.items()}, staging / OPTIMIZER)
            (staging / TRAIN_STATE).write_text(_json(state), encoding="utf-8")
            flush_all(staging)
            if target.exists():
                _remove(target)
            staging.rename(target)
        flush(target.parent)
    for old in checkpoints(run)[:-keep]:
        if step_of(old) != always:
            _remove(old)
    return target


def checkpoint_folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def checkpoints(run: Path) -> list[Path]:
    """The complete checkpoints of a run folder, oldest first."""
    needed = (CONFIG, WEIGHTS, OPTIMIZER, TRAIN_STATE)
    named = [path for path in (run / "checkpoints").glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name)]
    return sorted((path for path in named if all((path / name).is_file() for name in needed)), key=step_of)


def drop(run: Path, step: int) -> None:
    """Removes the checkpoints of later steps than `step`."""
    for path in checkpoints(run):
        if step_of(path) > step:
            _remove(path)


def read_checkpoint(path: Path, model: Model) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """(weights for `model`, the optimiser's named state, train_state.json); changes nothing. Raises InputError as `load`."""
    weights = _read_weights(path / WEIGHTS, model)
    with opened(path / OPTIMIZER) as file:
        optimizer = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (not a dictionary)
    return weights, optimizer, read_json(path / TRAIN_STATE)


def clean(run: Path) -> None:
    """Removes what a killed process left half-written or half-removed among the checkpoints."""
    for path in (run / "checkpoints").glob(f"*{TEMPORARY}"):
        shutil.rmtree(path)


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Writes a JSON file, as `write_text` does."""
    write_text(path, _json(values))


def write_text(path: Path, text: str) -> None:
    """Writes a file, whole or not at all; one that was there is replaced at one moment. A pipe, a device or a link (such as
    /dev/stdout) is written to and stays what it is.

    Raises InputError when it cannot be written. Of two processes that write the same file, the later one's stays.
    """
    if path.is_symlink() or (path.exists() and not path.is_file() and not path.is_dir()):
        _write_into(path, text)
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY}")
    try:
        temporary.write_text(text, encoding="utf-8", newline="\n")
        flush(temporary)
        os.replace(temporary, path)
        flush(path.parent)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror}); choose a folder you may write to") from None
    finally:
        # Where it could not be made it cannot be removed either, and the reason is told already.
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


# ------------------------------------------------------------------------------------------------------------------ writing


def _write_into(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror}); choose another file") from None


def _check_savable(model: Model, tokenizer: Tokenizer | None) -> None:
    if tokenizer is not None and tokenizer.vocab_size > model.config.vocab_size:
        raise InputError(
            f"tokenizer: ids reach {tokenizer.vocab_size - 1}; the model's vocabulary has {model.config.vocab_size} entries; "
            "save it with the tokenizer it was trained with"
        )
    for name, parameter in model.named_parameters():
        if not bool(parameter.isfinite().all()):
            raise InputError(f"model: tensor {name!r} holds NaN or infinity; nothing was saved, use an earlier checkpoint")


def _write_model(folder: Path, model: Model, tokenizer: Tokenizer | None) -> None:
    # named_parameters gives a tied tensor once, under its first name: the embedding's.
    tensors = {name: parameter.detach().contiguous() for name, parameter in model.named_parameters()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(_json({"format": FORMAT, **model.config.to_dict()}), encoding="utf-8")
    if tokenizer is not None:
        tokenizer.save(folder)


@contextlib.contextmanager
def staged(target: Path) -> Iterator[Path]:
    """An empty folder beside `target` to write in; it is gone afterwards, whatever happens."""
    staging = target.with_name(f".{target.name}{TEMPORARY}")
    try:
        if target.exists() and not target.is_dir():
            raise InputError(f"{target}: it is a file; give a folder")
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        yield staging
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{target}: cannot be written ({reason}); give a folder on a disk with room") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _remove(folder: Path) -> None:
    """Takes the name away first: whenever the process dies, no part of the folder passes for the whole."""
    doomed = folder.with_name(f".{folder.name}.old{TEMPORARY}")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed)


def _json(values: dict[str, Any]) -> str:
    return json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def flush_all(folder: Path) -> None:
    for path in [*folder.iterdir(), folder]:
        flush(path)


def flush(path: Path) -> None:
    """Asks the system to have the file or folder on the disk now."""
    if path.is_dir() and os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ------------------------------------------------------------------------------------------------------------------ reading


def _model_folder(path: Path) -> Path:
    if not path.exists():
        raise InputError(f"{path}: no such folder; give one that `palimpsest train` or `palimpsest.save` wrote")
    if not path.is_dir():
        raise InputError(f"{path}: it is a file; give the folder it is in")
    if (path / CONFIG).is_file():
        return path
    if (path / "checkpoints").is_dir():
        complete = checkpoints(path)
        if not complete:
            raise InputError(f"{path}: the run has no complete checkpoint; train until it has written one")
        return complete[-1]
    raise InputError(f"{path}: no {CONFIG} in this folder; give one that `palimpsest train` or `palimpsest.save` wrote")


def _read_config(path: Path) -> ModelConfig:
    values = read_json(path)
    kind = values.pop("format", None)
    if kind != FORMAT:
        raise InputError(f"{path}: format is {kind!r}; this version loads {FORMAT!r} only")
    return ModelConfig.from_dict(values, str(path))


def read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid JSON ({error}); the file is damaged") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check the path") from None
    if not isinstance(values, dict):
        raise InputError(f"{path}: expected a JSON object, found {type(values).__name__}")
    return values


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A safetensors file. Raises InputError when it is damaged or missing."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise InputError(
            f"{path}: not a whole safetensors file ({error}); it was cut short or damaged: copy it again"
        ) from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or 'no such file'}); the folder is incomplete") from None


def _weights_dtype(path: Path) -> torch.dtype:
    """That of the embedding; whether the other tensors agree with it is `_read_weights`' to check."""
    with opened(path) as file:
        if "embed_tokens.weight" not in file.keys():  # noqa: SIM118 (not a dictionary)
            return torch.float32
        return DTYPES.get(file.get_slice("embed_tokens.weight").get_dtype(), torch.float32)


def _read_weights(path: Path, model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a file that must have exactly the names, shapes and dtypes of `model`'s parameters."""
    expected = dict(model.named_parameters())
    codes = {dtype: code for code, dtype in DTYPES.items()}
    with opened(path) as file:
        found = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dictionary)
        for problem, names in (("is missing", expected.keys() - found.keys()), ("is unknown", found.keys() - expected.keys())):
            if names:
                more = f", and {len(names) - 1} more" if len(names) > 1 else ""
                raise InputError(
                    f"{path}: tensor {min(names)!r} {problem}{more}; expected {len(expected)} tensors, found {len(found)}; "
                    f"the file and {CONFIG} do not belong together"
                )
        for name, parameter in expected.items():
            wanted = f"{codes.get(parameter.dtype)} {list(parameter.shape)}"
            have = f"{found[name].get_dtype()} {list(found[name].get_shape())}"
            if have != wanted:
                raise InputError(
                    f"{path}: tensor {name!r} is {have}; expected {wanted}; the file and {CONFIG} do not belong together"
                )
        tensors = {name: file.get_tensor(name).clone() for name in expected}
    for name, tensor in tensors.items():
        bad = int((~tensor.isfinite()).sum())
        if bad:
            raise InputError(
                f"{path}: tensor {name!r} holds NaN or infinity, {bad} of {tensor.numel()} values; expected finite numbers; "
                "use another copy or an earlier checkpoint"
            )
    return tensors


def fill(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Gives a model on the meta device its parameters; tied ones stay tied."""
    real = {
        id(parameter): nn.Parameter(tensors[name], requires_grad=parameter.requires_grad)
        for name, parameter in model.named_parameters()
    }
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, real[id(parameter)])
