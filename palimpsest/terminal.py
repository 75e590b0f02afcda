"""A conversation in the terminal: lines in, answers as they are drawn, and commands that begin with a slash."""

from __future__ import annotations

from pathlib import Path

from palimpsest.config import InputError, SamplingConfig
from palimpsest.conversation import Conversation
from palimpsest.plan import units

HELP = """/save FILE   keep this conversation's memory in a file
/load FILE   go on from one
/memory      what is held now
/clear       begin anew
/quit        end (so does Ctrl-D); Ctrl-C ends an answer"""


def talk(conversation: Conversation, sampling: SamplingConfig) -> None:
    """Reads lines until the end of input. Mistakes are shown and change nothing."""
    system = next((message["content"] for message in conversation.messages if message["role"] == "system"), None)
    print(f"{summary(conversation)}; /help lists commands", flush=True)
    turns = 0
    while True:
        try:
            line = input("> ").strip()
            line.encode()  # in some locales bytes that are not UTF-8 arrive as halves of surrogate pairs
        except EOFError:
            print()
            return
        except UnicodeError:
            print("that was not UTF-8 and is left out; set the terminal to UTF-8", flush=True)
            continue
        if line == "/quit":
            return
        try:
            if line == "/clear":
                conversation.__init__(conversation.model, conversation.tokenizer, system)
            elif line.startswith("/"):
                print(command(conversation, line), flush=True)
            elif line:
                seed = None if sampling.seed is None else (sampling.seed + turns) % 2**63
                answer(conversation, line, sampling.replace(seed=seed))
                turns += 1
        except InputError as error:
            print(error, flush=True)


def answer(conversation: Conversation, text: str, sampling: SamplingConfig) -> None:
    """Prints an answer; Ctrl-C ends it, and what was said is kept."""
    pieces = conversation.say(text, sampling)
    try:
        for piece in pieces:
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        print(" ...", end="")
    print(flush=True)


def command(conversation: Conversation, line: str) -> str:
    """What a slash command answers; InputError for one that does not exist or lacks its file."""
    name, _, argument = line.partition(" ")
    try:
        path = Path(argument.strip()).expanduser()
    except RuntimeError as error:
        raise InputError(f"{argument.strip()}: {error}; write the folder out") from None
    if name == "/help":
        return HELP
    if name == "/memory":
        return summary(conversation)
    if name in ("/save", "/load") and not argument.strip():
        raise InputError(f"{name}: give a file name")
    if name == "/save":
        size = conversation.save(path)
        return f"{path}: {units.bytes_text(size)}; {summary(conversation)}"
    if name == "/load":
        conversation.load(path)
        return f"{path}: {len(conversation.messages)} messages; {summary(conversation)}"
    raise InputError(f"{name}: no such command; /help lists them")


def summary(conversation: Conversation) -> str:
    """Tokens held, and the bytes that hold them: a cache that grows, a state that does not."""
    state = conversation.state
    fixed = state.num_bytes("recurrent") + state.num_bytes("conv")
    parts = f"{units.bytes_text(state.num_bytes('kv'))} of cache and {units.bytes_text(fixed)} of state"
    return f"{state.lengths[0]} tokens held in {parts}"
