"""What processes of tests/processes.py share: imported once, before they are made."""

import torch.distributed.device_mesh
import torch.distributed.fsdp
import torch.distributed.tensor  # noqa: F401

import palimpsest.train  # noqa: F401
import tests.conftest  # noqa: F401
