"""The chunked form against the same operation in transformers, timed in one process."""

import pytest
import torch
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention

from palimpsest import ops
from palimpsest.benchmark import median_seconds


@pytest.mark.slow
def test_kda_forward_takes_less_than_a_tenth_of_the_time_of_transformers():
    generator = torch.Generator().manual_seed(0)
    q, k, v, z = (torch.randn(1, 2048, 8, 128, generator=generator) for _ in range(4))
    q, k, g = ops.l2norm(q), ops.l2norm(k), -0.1 * z.sigmoid()
    beta = torch.rand(1, 2048, 8, generator=generator)
    with torch.no_grad():
        expected, _ = chunk_kimi_delta_attention(q, k, v, g, beta, output_final_state=True)
        theirs = median_seconds(lambda: chunk_kimi_delta_attention(q, k, v, g, beta), 3)
        for backend in ("chunked", None):
            o, _ = ops.kda(q, k, v, g, beta, backend=backend)
            torch.testing.assert_close(o, expected, rtol=1e-4, atol=1e-5)
            ours = median_seconds(lambda backend=backend: ops.kda(q, k, v, g, beta, backend=backend), 7)
            assert ours < theirs / 10, f"{backend}: {ours * 1e3:.0f} ms against {theirs * 1e3:.0f} ms"
