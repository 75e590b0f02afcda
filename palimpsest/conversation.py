"""A conversation whose history is a state: what was said before is never read again, and fits in a file.

conversation = Conversation(model, tokenizer)
for piece in conversation.say("Hello", SamplingConfig()): ...
conversation.save("hello.memory")     # safetensors: tensors of the state, and the words as metadata
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from palimpsest.calls import reader
from palimpsest.config import InputError, SamplingConfig
from palimpsest.generate import Row, draw
from palimpsest.messages import message_ids, stop_texts
from palimpsest.model import Model
from palimpsest.state import State
from palimpsest.state_file import filled, named
from palimpsest.tokenizer import Tokenizer

FORMAT = "palimpsest-memory-1"
PIECE = 512  # tokens read at a time


class Conversation:
    """Messages so far, and the state after `ids`, every token of it; `prompt_state` is that before the latest answer."""

    def __init__(self, model: Model, tokenizer: Tokenizer, system: str | None = None) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
        self.ids: list[int] = []
        self.state = model.new_state()
        self.prompt_state = self.state
        self.tokens_read = 0  # by the latest turn, before its answer

    def say(self, text: str, config: SamplingConfig) -> Iterator[str]:
        """The answer in pieces. It is kept as far as it was taken from the iterator. InputError before any work."""
        messages = [*self.messages, {"role": "user", "content": text}]
        ids = message_ids(self.tokenizer, messages)
        limit = self.model.config.max_position_embeddings
        if self.model.config.position != "none" and len(ids) >= limit:
            raise InputError(f"the conversation has {len(ids)} tokens and the context {limit}; begin a new one")
        room = config.max_new_tokens if self.model.config.position == "none" else min(config.max_new_tokens, limit - len(ids))
        stops = config.replace(max_new_tokens=room, stop=[*config.stop, *stop_texts(self.tokenizer)])
        return self._say(messages, ids, Row(self.model, self.tokenizer, ids, stops), stops)

    @torch.inference_mode()
    def _say(self, messages: list[dict[str, Any]], ids: list[int], row: Row, config: SamplingConfig) -> Iterator[str]:
        state = self._known(ids)
        unread = ids[state.lengths[0] :]
        self.tokens_read = len(unread)
        hidden = torch.empty(0)
        for start in range(0, len(unread), PIECE):
            hidden, state = self._read(unread[start : start + PIECE], state)
        self.ids, self.state, self.prompt_state = ids, state, state
        self.messages = messages
        answer = {"role": "assistant", "content": ""}
        self.messages.append(answer)
        words = reader(self.tokenizer, tools=False)
        while row.finish_reason is None:
            token = draw(self.model.logits(hidden).cpu()[: row.vocab_size], config, row.generator)
            said = [words.push(row.take(token))]
            if row.finish_reason is not None:
                said.append(words.finish())
            for each in said:
                answer["content"] += each.content
                if each.thought:
                    answer["reasoning_content"] = answer.get("reasoning_content", "") + each.thought
                if piece := each.thought + each.content:
                    yield piece
            if row.finish_reason is None:
                hidden, self.state = self._read([token], self.state)
                self.ids = [*ids, *row.token_ids]

    def _known(self, ids: list[int]) -> State:
        """The latest state that these ids go on from with at least one token."""
        for state in (self.state, self.prompt_state):
            length = state.lengths[0]
            if length < len(ids) and ids[:length] == self.ids[:length]:
                return state
        return self.model.new_state()

    def _read(self, ids: list[int], state: State) -> tuple[Tensor, State]:
        hidden, state = self.model.hidden(torch.tensor([ids], device=self.model.embed_tokens.weight.device), state)
        return hidden[0, -1], state

    def save(self, path: Path) -> int:
        """Writes the memory to a file and returns the file's size in bytes."""
        about = {"ids": self.ids, "messages": self.messages, "model": fingerprint(self.model, self.tokenizer)}
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            save_file(named(self.state), temporary, {"format": FORMAT, "about": json.dumps(about)})
            os.replace(temporary, path)
        except (OSError, SafetensorError) as error:
            raise InputError(f"{path}: cannot be written ({error}); give another file") from None
        finally:
            temporary.unlink(missing_ok=True)
        return path.stat().st_size

    def load(self, path: Path) -> None:
        """Goes on from a saved memory. InputError, with nothing changed, for another model's or a damaged file."""
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != FORMAT:
                    raise InputError(f"{path}: not a saved conversation; give a file that /save wrote")
                about = json.loads(metadata["about"])
                ids, messages = [int(token) for token in about["ids"]], [dict(message) for message in about["messages"]]
                if about["model"] != fingerprint(self.model, self.tokenizer):
                    raise InputError(f"{path}: the memory of another model; open that one, or begin a new conversation")
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            state = filled(self.model.new_state(), tensors, len(ids))
        except InputError:
            raise
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise InputError(f"{path}: cannot be read ({error}); give a file that /save wrote") from None
        self.ids, self.messages = ids, messages
        self.state = self.prompt_state = state


def fingerprint(model: Model, tokenizer: Tokenizer) -> str:
    """Of configuration, tokenizer and a sample of every weight: a memory means nothing to other weights."""
    digest = hashlib.sha256(json.dumps([model.config.to_dict(), tokenizer.fingerprint]).encode())
    for name, parameter in model.named_parameters():
        flat = parameter.detach().flatten()
        sample = flat[:: max(1, len(flat) // 64)][:64].cpu()
        digest.update(name.encode() + (sample if sample.dtype == torch.uint8 else sample.double()).numpy().tobytes())
    return digest.hexdigest()
