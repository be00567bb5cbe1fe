"""Sequences of tokens from a text: its first 90 % are trained on, the rest validates, as in char-rnn and nanoGPT.

A token is a character of the text (its vocabulary is the characters that it has, in the order of Unicode) or a byte.

An epoch cuts the training part anew into sequences that follow each other without a gap, beginning at a random offset,
and shuffles them. Every token is predicted once, but for fewer than two sequences' worth at the ends, and the
boundaries fall elsewhere in every epoch. Validation cuts the other part once, from its beginning; what is left over at
the end, less than a sequence, is not predicted. The first tokens of a sequence have little context in either.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dcil.data.batches import Batch, Shard
from dcil.errors import UserError

TOKENS = ("characters", "bytes")
TRAINED = 0.9
#: The most characters of a vocabulary, and the most bytes of a text, which is held in memory several times.
MAX_VOCABULARY, MAX_BYTES = 100_000, 2**31


@dataclass(frozen=True, eq=False)
class Text:
    """Hold the bytes of a text; ``file`` is the name it is recorded by, ``name`` that of the data set."""

    name: str
    file: str
    content: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if not self.content:
            raise UserError(f"{self.file} must hold a text, it is empty")
        if len(self.content) > MAX_BYTES:
            raise UserError(f"{self.file} must have at most {MAX_BYTES:,} bytes, has {len(self.content):,}: cut it")

    def sequences(self, tokens: str, length: int) -> Sequences:
        """Return the data set of sequences of ``length`` tokens each, to be predicted from those before."""
        ids, vocabulary = self.as_bytes() if tokens == "bytes" else self.as_characters()
        return Sequences(self, ids, vocabulary, length)

    def as_bytes(self) -> tuple[npt.NDArray[Any], None]:
        """Return the token of each byte: its value."""
        return np.frombuffer(self.content, np.uint8), None

    def as_characters(self) -> tuple[npt.NDArray[Any], str]:
        """Return the token of each character, and the vocabulary."""
        try:
            text = self.content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(
                f"{self.file} must be UTF-8 for --tokens characters, byte {error.start:,} is not: "
                "--tokens bytes takes any file"
            ) from None
        codes = np.frombuffer(text.encode("utf-32-le"), "<u4")
        present = np.zeros(sys.maxunicode + 1, bool)
        present[codes] = True
        found = np.flatnonzero(present)
        if len(found) > MAX_VOCABULARY:
            raise UserError(
                f"{self.file} must have at most {MAX_VOCABULARY:,} different characters, has {len(found):,}: "
                "--tokens bytes has 256"
            )
        numbers = (np.cumsum(present) - 1).astype(np.uint8 if len(found) <= 256 else np.int32)
        return numbers[codes], "".join(map(chr, found))


@dataclass(frozen=True, eq=False)
class Sequences:
    """A text as sequences of ``length`` tokens; ``vocabulary`` is None where tokens are bytes."""

    text: Text
    ids: npt.NDArray[Any]
    vocabulary: str | None
    length: int

    def __post_init__(self) -> None:
        for part, ids in (("first 90 %", self.train_ids), ("last 10 %", self.validation_ids)):
            if len(ids) <= self.length:
                raise UserError(
                    f"the {part} of {self.text.file} must have more tokens than a sequence, {self.length}, have "
                    f"{len(ids)}: choose a smaller --length or a longer text"
                )

    @property
    def name(self) -> str:
        return self.text.name

    @property
    def classes(self) -> int:
        return 256 if self.vocabulary is None else len(self.vocabulary)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.length,)

    @property
    def cut(self) -> int:
        """Return the number of tokens that are trained on."""
        return int(TRAINED * len(self.ids))

    @property
    def train_ids(self) -> npt.NDArray[Any]:
        return self.ids[: self.cut]

    @property
    def validation_ids(self) -> npt.NDArray[Any]:
        return self.ids[self.cut :]

    @property
    def train_size(self) -> int:
        """Return the number of sequences of an epoch."""
        return max(1, len(self.train_ids) // self.length - 1)

    @cached_property
    def record(self) -> dict[str, Any]:
        """Return what a run's config says about its text."""
        content = self.text.content
        digest = hashlib.sha256(content).hexdigest()
        found = {
            "file": self.text.file,
            "bytes": len(content),
            "sha256": digest,
            "bytes_per_token": self.bytes_per_token,
        }
        return found if self.vocabulary is None else found | {"vocabulary": self.vocabulary}

    @property
    def bytes_per_token(self) -> float:
        """Return the mean of the part that validates, which turns nats per token into bits per byte."""
        if self.vocabulary is None:
            return 1.0
        sizes = np.array([len(character.encode()) for character in self.vocabulary])
        return float(sizes[self.validation_ids].mean())

    def loader(self, batch: int, device: torch.device | str, seed: int, rank: int = 0, world: int = 1) -> TextLoader:
        return TextLoader(self, batch, device, seed, rank, world)


class TextLoader:
    """Yield batches of (tokens, next tokens), int64 (N, length) each; the whole text is on the device."""

    def __init__(
        self, data: Sequences, batch: int, device: torch.device | str, seed: int, rank: int = 0, world: int = 1
    ) -> None:
        self.shard = Shard(batch, rank, world)
        self.batch, self.seed, self.device = batch, seed, torch.device(device)
        self.length, self.count = data.length, data.train_size
        self.tokens = torch.tensor(data.train_ids, device=self.device)
        self.validation = torch.tensor(data.validation_ids, device=self.device)
        self.offsets = torch.arange(self.length + 1, device=self.device)

    @property
    def steps(self) -> int:
        """Return the optimizer steps of an epoch; the last batch may be smaller."""
        return self.shard.steps(self.count)

    @property
    def test_size(self) -> int:
        """Return the number of sequences that validate."""
        return (len(self.validation) - 1) // self.length

    def draw(self, epoch: int) -> Tensor:
        """Draw where the sequences of an epoch begin, in their order, on the CPU: by (seed, epoch) and nothing else."""
        state = np.random.SeedSequence((self.seed, epoch)).generate_state(1, np.uint64)
        generator = torch.Generator().manual_seed(int(state[0]))
        room = len(self.tokens) - 1 - self.count * self.length  # that the sequences and the last target leave
        offset = torch.randint(room + 1, (), generator=generator)
        return offset + self.length * torch.randperm(self.count, generator=generator)

    def train(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield every sequence of the epoch once, in a random order; from batch ``start`` on."""
        starts = self.draw(epoch).to(self.device)
        for part in self.shard.slices(self.count, start):
            yield self.read(self.tokens, starts[part])

    def test(self) -> Iterator[Batch]:
        """Yield the sequences that validate, in the order of the text."""
        starts = self.length * torch.arange(self.test_size, device=self.device)
        for part in self.shard.slices(self.test_size):
            yield self.read(self.validation, starts[part])

    def read(self, tokens: Tensor, starts: Tensor) -> Batch:
        """Return the sequences that begin at ``starts``, and the token that follows each of their tokens."""
        found = tokens[starts[:, None] + self.offsets].long()
        return found[:, :-1].contiguous(), found[:, 1:].contiguous()
