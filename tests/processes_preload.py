"""What processes of tests/processes.py share: imported once, before they are made."""

import torch.distributed.device_mesh  # noqa: F401
import torch.distributed.fsdp  # noqa: F401
import torch.distributed.tensor  # noqa: F401

import palimpsest.train  # noqa: F401
import tests.conftest  # noqa: F401
