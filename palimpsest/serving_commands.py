"""The commands `palimpsest serve` and `palimpsest chat`."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from palimpsest.config import InputError
from palimpsest.output import Text
from palimpsest.plan import units

if TYPE_CHECKING:
    from palimpsest.model import Model
    from palimpsest.tokenizer import Tokenizer

KEY_VARIABLE = "PALIMPSEST_API_KEY"
DRAFT_GUESSES = 4  # tokens
DRAIN_S = 15  # that running answers have to end when the server is told to


def serve(
    folder: Path,
    /,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    name: Annotated[str | None, Text] = None,
    api_key: Annotated[str | None, Parameter(env_var=KEY_VARIABLE)] = None,
    memory: str | None = None,
    prefix_memory: str = "1GB",
    prefix_disk: str = "0",
    context: int | None = None,
    running: int = 64,
    queued: int = 256,
    guesses: int | None = None,
    draft: Path | None = None,
    device: str = "cpu",
) -> None:
    """Answer OpenAI's interface and a chat page over HTTP until Ctrl-C.

    Parameters
    ----------
    folder
        A model in any form that `palimpsest generate` opens, with a tokenizer.
    host
        Address to listen on; others than this machine's own are reachable from outside, so give a key with them.
    port
        0 takes a free one and says which.
    name
        What clients call the model; by default the folder's name.
    api_key
        Clients must send it as a bearer token.
    memory
        What running requests may hold, such as 4GB; by default half of what is free.
    prefix_memory
        What remembered beginnings of prompts may hold; 0 turns them off.
    prefix_disk
        What they may hold on disk when memory is full, in the system's temporary folder; 0 forgets them instead.
    context
        The most tokens of a prompt and its answer together; by default what the model and the memory allow.
    running
        The most answers at a time.
    queued
        The most requests that wait; more are sent away.
    guesses
        The most tokens guessed from the text itself and checked at once; 0, the default, turns guessing off. Answers stay the
        same.
    draft
        A smaller model with the same tokenizer that guesses instead, by default at most 4 tokens at a time.
    device
        Where the model runs, such as cpu or cuda.
    """
    budget = None if memory is None else _bytes("--memory", memory)
    cache, disk = _bytes("--prefix-memory", prefix_memory), _bytes("--prefix-disk", prefix_disk)
    guesses = (0 if draft is None else DRAFT_GUESSES) if guesses is None else guesses
    least_guesses = 0 if draft is None else 1
    for flag, value, least in (("--running", running, 1), ("--queued", queued, 1), ("--guesses", guesses, least_guesses)):
        if value < least:
            raise InputError(f"{flag} is {value}; it must be at least {least}")
    if api_key is not None and not api_key.strip():
        raise InputError(f"--api-key is empty; leave it and {KEY_VARIABLE} out, or give a key")
    try:
        import uvicorn

        from palimpsest.server import Settings, create_app
        from palimpsest.server.limits import MOST_HEADER_BYTES
    except ImportError as error:
        raise InputError(f"the package {error.name} is missing; install palimpsest-lm[serve]") from None
    from palimpsest.engine import DraftModel, Engine, Worker
    from palimpsest.progress import keep_memory

    keep_memory()
    with _listen(host, port) as listener:
        model, tokenizer = open_model(folder, device)
        guesser = None if draft is None else DraftModel(*open_model(draft, device))
        engine = Engine(
            model,
            tokenizer,
            budget,
            cache,
            context,
            most_running=running,
            guess_tokens=guesses,
            draft=guesser,
            disk_bytes=disk,
        )
        local = host in ("127.0.0.1", "localhost", "::1")
        settings = Settings(name or folder.resolve().name, api_key, queued, local_only=local)
        config = uvicorn.Config(
            create_app(Worker(engine), settings),
            log_level="warning",
            h11_max_incomplete_event_size=MOST_HEADER_BYTES,
            timeout_graceful_shutdown=DRAIN_S,
            server_header=False,
        )
        where = f"[{host}]" if ":" in host else host
        limit = "any length" if engine.context_tokens is None else f"{engine.context_tokens} tokens"
        print(
            f"{settings.model_name} at http://{where}:{listener.getsockname()[1]} (context: {limit}); Ctrl-C ends it",
            flush=True,
        )
        if not local and api_key is None:
            print("anybody who reaches this address may use it; --api-key limits it to those who have a key", flush=True)
        uvicorn.Server(config).run(sockets=[listener])


def chat(
    folder: Path,
    /,
    *,
    system: Annotated[str | None, Text] = None,
    max_new_tokens: int = 512,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 0.95,
    seed: int | None = None,
    memory: Path | None = None,
    device: str = "cpu",
) -> None:
    """Talk with a model in the terminal. /save and /load keep a conversation's memory in a file; /help lists the rest.

    Parameters
    ----------
    folder
        A model in any form that `palimpsest generate` opens, with a tokenizer.
    system
        What the model is told before the conversation.
    max_new_tokens
        The most tokens of an answer.
    temperature
        0 always takes the likeliest token; 1 draws from the model as it is.
    top_k
        Draw among this many likeliest tokens; 0 is all.
    top_p
        Draw among the likeliest tokens that hold this share of the probability.
    seed
        Makes answers repeatable.
    memory
        A file that /save wrote, to go on from.
    device
        Where the model runs, such as cpu or cuda.
    """
    from palimpsest.config import SamplingConfig
    from palimpsest.conversation import Conversation
    from palimpsest.terminal import talk

    sampling = SamplingConfig(max_new_tokens, temperature, top_k, top_p, seed)
    conversation = Conversation(*open_model(folder, device), system)
    if memory is not None:
        conversation.load(memory)
    talk(conversation, sampling)


def open_model(folder: Path, device: str) -> tuple[Model, Tokenizer]:
    """A model that can talk, on a device."""
    import torch

    from palimpsest.published import load

    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"--device {device}: {str(error).splitlines()[0]}") from None
    model, tokenizer = load(folder)
    if tokenizer is None:
        raise InputError(f"{folder}: there is no tokenizer in it; save the model with one")
    return model.to(place).eval(), tokenizer


def _bytes(flag: str, value: str) -> int:
    try:
        return 0 if value.strip() == "0" else units.num_bytes(flag, value)
    except InputError as error:
        raise InputError(str(error).removeprefix("plan: ")) from None


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket before anything is loaded, so that a taken port costs no time."""
    if not 0 <= port < 2**16:
        raise InputError(f"--port {port}: it must be in 0..65535")
    listener = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        if os.name == "posix":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise InputError(f"--host {host} --port {port}: {error}; choose another") from None
    return listener
