"""Many requests at once through one model, whatever it remembers with.

    request.py     what is asked for, and an answer while it is drawn
    prefixes.py    memories of beginnings, so that they are read once
    spill.py       those that had to leave memory, in files
    passes.py      one pass of a model over new tokens of several sequences
    drafts.py      guesses at what comes next, from the text or a smaller model, checked several at a time
    batches.py     answers that are drawn together, and what their memory costs
    gauges.py      what recurrent memories do with a token
    scheduler.py   who is read and who is drawn in the next round
    worker.py      the thread that does it, for callers in other threads

The state of a sequence is one value, keys and values, latents or matrices, so all of this is written once: joining,
selecting and going back are operations of `State`. Greedy answers do not depend on their neighbours, on whether a beginning
was remembered, or on guesses: in float32 the same tokens; in lower precision products of other shapes round otherwise.
"""

from palimpsest.engine.drafts import DraftModel
from palimpsest.engine.request import Constraint, Piece, Request, Ticket, TokenScore
from palimpsest.engine.scheduler import ContextExceeded, Engine
from palimpsest.engine.worker import Worker

__all__ = ["Constraint", "ContextExceeded", "DraftModel", "Engine", "Piece", "Request", "Ticket", "TokenScore", "Worker"]
