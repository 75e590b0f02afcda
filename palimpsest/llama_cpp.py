"""llama.cpp on a GGUF file, for comparisons: xllamacpp's library, called through llama-cpp-py-sync's table of C types."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

PACKAGES = ("xllamacpp", "llama_cpp_py_sync")


def is_installed() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in PACKAGES)


class Llama:
    """A GGUF file: its tokenizer, its logits, its likeliest continuation; keys and values in float32."""

    def __init__(self, path: Path) -> None:
        self.ffi: Any = import_module("llama_cpp_py_sync._cffi_bindings").get_ffi()
        package: Any = import_module("xllamacpp")
        self.lib: Any = self.ffi.dlopen(str(Path(package.__file__).parent / "xllamacpp.abi3.so"))
        self.silent = self.ffi.callback("void(enum ggml_log_level, char *, void *)", lambda level, text, user: None)
        self.lib.llama_log_set(self.silent, self.ffi.NULL)
        self.lib.llama_backend_init()
        self.model = self.lib.llama_model_load_from_file(str(path).encode(), self.lib.llama_model_default_params())
        if self.model == self.ffi.NULL:
            raise ValueError(f"llama.cpp does not open {path}")
        self.vocab = self.lib.llama_model_get_vocab(self.model)
        self.size = self.lib.llama_vocab_n_tokens(self.vocab)

    def encode(self, text: str) -> list[int]:
        raw = text.encode()
        ids = self.ffi.new("llama_token[]", len(raw) + 1)
        count = self.lib.llama_tokenize(self.vocab, raw, len(raw), ids, len(raw) + 1, False, False)
        return list(ids[0:count])

    def decode(self, ids: list[int]) -> str:
        text = b""
        for i in ids:
            piece = self.ffi.new("char[]", 256)
            text += bytes(self.ffi.buffer(piece, self.lib.llama_token_to_piece(self.vocab, i, piece, 256, 0, True)))
        return text.decode("utf-8", "replace")

    def context(self, threads: int = 2, tokens: int = 1024) -> Any:
        """A sequence's memory, for `step`; `lib.llama_free` gives it back."""
        settings = self.lib.llama_context_default_params()
        settings.n_ctx = settings.n_batch = tokens
        settings.n_ubatch = min(tokens, 512)  # at a time, as by itself
        settings.n_threads = settings.n_threads_batch = threads
        settings.type_k = settings.type_v = settings.flash_attn_type = 0  # float32 rows, plain attention
        return self.lib.llama_init_from_model(self.model, settings)

    def step(self, context: Any, tokens: list[int], at: int, every: bool = True) -> np.ndarray[Any, Any]:
        """Logits [T,vocab] of `tokens`, the first of them at position `at`; only the last's unless `every`."""
        batch = self.lib.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for n, token in enumerate(tokens):
            batch.token[n], batch.pos[n], batch.n_seq_id[n], batch.logits[n] = token, at + n, 1, every or n == len(tokens) - 1
            batch.seq_id[n][0] = 0
        status = self.lib.llama_decode(context, batch)
        wanted = range(len(tokens)) if every else (len(tokens) - 1,)
        rows = [self.ffi.buffer(self.lib.llama_get_logits_ith(context, n), self.size * 4) for n in wanted]
        found = np.stack([np.frombuffer(row, np.float32).copy() for row in rows])
        self.lib.llama_batch_free(batch)
        if status != 0:
            raise ValueError(f"llama.cpp stopped with status {status}")
        return found

    def together(self, prompts: Sequence[Sequence[int]], count: int, threads: int = 2) -> tuple[list[list[int]], float]:
        """`count` tokens after every prompt, the likeliest, one of each in a pass, and the seconds that this took.

        Keys, values and attention are as llama.cpp has them by itself, not in float32 as elsewhere here.
        """
        settings = self.lib.llama_context_default_params()
        longest, total = max(map(len, prompts)) + count, sum(map(len, prompts))
        settings.n_seq_max = len(prompts)
        settings.n_ctx = len(prompts) * longest
        settings.n_batch = settings.n_ubatch = max(total, 512)
        settings.n_threads = settings.n_threads_batch = threads
        context = self.lib.llama_init_from_model(self.model, settings)
        if context == self.ffi.NULL:
            raise ValueError(f"llama.cpp makes no room for {len(prompts)} sequences of {longest} tokens")
        batch = self.lib.llama_batch_init(total, 0, 1)
        drawn: list[list[int]] = [[] for _ in prompts]
        pieces, places = [list(prompt) for prompt in prompts], [0] * len(prompts)
        start = time.perf_counter()
        try:
            for _ in range(count):
                ends = self._put(batch, pieces, places)
                status = self.lib.llama_decode(context, batch)
                if status != 0:
                    raise ValueError(f"llama.cpp stopped with status {status}")
                for row, end in enumerate(ends):
                    logits = self.ffi.buffer(self.lib.llama_get_logits_ith(context, end), self.size * 4)
                    drawn[row].append(int(np.frombuffer(logits, np.float32).argmax()))
                places = [place + len(piece) for place, piece in zip(places, pieces, strict=True)]
                pieces = [row[-1:] for row in drawn]
            seconds = time.perf_counter() - start
        finally:
            self.lib.llama_batch_free(batch)
            self.lib.llama_free(context)
        return drawn, seconds

    def _put(self, batch: Any, pieces: list[list[int]], places: list[int]) -> list[int]:
        """Fills a batch, sequence by sequence; logits are wanted at the last token of each, whose numbers come back."""
        n, ends = 0, []
        for row, (piece, place) in enumerate(zip(pieces, places, strict=True)):
            for offset, token in enumerate(piece):
                batch.token[n], batch.pos[n], batch.n_seq_id[n] = token, place + offset, 1
                batch.seq_id[n][0], batch.logits[n] = row, offset == len(piece) - 1
                n += 1
            ends.append(n - 1)
        batch.n_tokens = n
        return ends

    def run(self, ids: list[int], count: int) -> tuple[np.ndarray[Any, Any], list[int]]:
        """Logits of all tokens, and `count` drawn after them, one step at a time."""
        context = self.context()
        logits = self.step(context, ids, 0)
        drawn = [int(logits[-1].argmax())]
        while len(drawn) < count:
            drawn.append(int(self.step(context, drawn[-1:], len(ids) + len(drawn) - 1)[-1].argmax()))
        self.lib.llama_free(context)
        return logits, drawn
