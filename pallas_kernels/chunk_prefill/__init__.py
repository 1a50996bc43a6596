"""The gated delta rule over a whole sequence, computed chunk by chunk."""

from pallas_kernels.chunk_prefill.reference import chunk_prefill
from pallas_kernels.chunk_prefill.spec import ChunkPrefillSpec

__all__ = ["ChunkPrefillSpec", "chunk_prefill"]
