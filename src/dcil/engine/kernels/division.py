"""How a matrix of rows by channels is divided among the programs of a kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
from torch import Tensor

MULTIPROCESSORS = 132  # of an H100 or H200; on other GPUs only the number of parts is less well chosen
LARGE = 2**24  # elements: what fits into the second-level cache


class Division(NamedTuple):
    """Block sizes of a kernel, blocks of channels, parts of rows, rows in each part."""

    blocks: dict[str, Any]
    num_blocks: int
    num_parts: int
    rows_per_part: int

    @property
    def grid(self) -> tuple[int]:
        return (self.num_blocks * self.num_parts,)


@dataclass(frozen=True)
class Plan:
    """How the kernels divide a matrix among programs; the numbers are the best of those measured on an H200."""

    num_rows: int
    channels: int

    @classmethod
    def of(cls, x: Tensor) -> Plan:
        return cls(x.numel() // x.shape[1], x.shape[1])

    @property
    def large(self) -> bool:
        """True beyond the cache, where memory bandwidth is the limit."""
        return self.num_rows * self.channels > LARGE

    def divide(self, block_elements: int, programs: int, max_channels: int = 64) -> Division:
        """Divide into blocks of ``block_elements``, in about ``programs`` programs."""
        block_channels = min(max_channels, int(triton.next_power_of_2(self.channels)))
        num_blocks, block_rows = int(triton.cdiv(self.channels, block_channels)), block_elements // block_channels
        max_parts = triton.cdiv(self.num_rows, block_rows)
        num_parts = max(1, min(max_parts, triton.cdiv(programs, num_blocks)))
        rows_per_part = block_rows * triton.cdiv(max_parts, num_parts)
        blocks = {"CHANNELS": self.channels, "BLOCK_ROWS": block_rows, "BLOCK_CHANNELS": block_channels, "num_warps": 4}
        return Division(blocks, num_blocks, int(triton.cdiv(self.num_rows, rows_per_part)), rows_per_part)

    def divide_sums(self) -> Division:
        """Divide for a kernel of partial sums: few parts, because every program of the next kernel adds them all up."""
        parts = 128 if self.num_rows >= 2**16 else 64
        num_blocks = triton.cdiv(self.channels, 64)
        return self.divide(8192, max(parts * num_blocks, 4 * MULTIPROCESSORS if self.large else 0))

    def divide_writes(self, block_elements: int) -> Division:
        """Divide for a kernel that writes the whole matrix."""
        if self.large:
            return self.divide(4096, self.num_rows * self.channels, max_channels=128)  # one block per program
        return self.divide(block_elements, 4 * MULTIPROCESSORS)
