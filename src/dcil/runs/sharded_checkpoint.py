"""Checkpoints of a network in parts (torch.distributed.checkpoint, DCP): every process writes what it holds.

RUN/checkpoint-parts/STEP/*.safetensors   the parts, one file for each process, as HuggingFaceStorageWriter writes them
RUN/checkpoint.safetensors                no tensors, but the notes of a checkpoint; also the SHA-256 of every part

The parts are written by threads while the training goes on, from copies in the memory of the host. The second file is
written when all parts are on disk, so that a kill at any moment leaves the checkpoint before or this one. DCP's default
storage would write a pickle; this one is safetensors throughout. Any number of processes reads what any other wrote.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.storage import WriteResult
from torch.optim import Optimizer

from dcil.net import SparseNet
from dcil.runs import checkpoint
from dcil.runs.atomic import CannotWrite, sync_file, sync_folder
from dcil.runs.checkpoint import STEP, Checkpoint
from dcil.runs.damage import ANEW, UnreadableFile, naming_file
from dcil.runs.position import START, Position
from dcil.sharding import is_sharded, like

#: The name of a part, as HuggingFaceStorageWriter gives it.
PART = re.compile(r"shard-\d+-model-\d+-of-\d+\.safetensors")
#: What DCP reads of a folder: all of them. Others are not of a checkpoint, such as the .nfs… of files in use.
ANY_PART = "*.safetensors"
FILE = "checkpoint.safetensors"


class PartsWriter(HuggingFaceStorageWriter):
    """Writes this process's part; rank 0 calls ``publish`` with the SHA-256 of all parts once they are there."""

    def __init__(self, folder: Path, publish: Callable[[dict[str, str]], None]) -> None:
        super().__init__(str(folder), save_distributed=True)
        self.folder, self.publish = folder, publish

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Remove the parts of a killed attempt of other processes; rank 0 calls this before any part is written."""
        if checkpoint.read_notes(self.folder.parents[1] / FILE).get("step") != self.folder.name:
            for part in self.folder.glob(ANY_PART):
                part.unlink()
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        results = super().write_data(plan, planner).wait()
        names = {result.storage_data.relative_path for result in results}
        for name in names:  # DCP's own fsync comes before Python has written the end of the file
            sync_file(self.folder / name)
        digests = {name: file_digest(self.folder / name) for name in names}
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        named = [(result, result.storage_data.relative_path) for result in results]
        done.set_result([replace(result, storage_data=(name, digests[name])) for result, name in named])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        sync_folder(self.folder)
        sync_folder(self.folder.parent)
        self.publish(dict(sorted(result.storage_data for each in results for result in each)))


class ShardedCheckpoints:
    """The checkpoints of a run in ``path`` whose network is sharded; every process has one and calls it together."""

    def __init__(self, path: Path) -> None:
        self.path, self.file = path, path / FILE
        self.group = dist.new_group(backend="gloo")  # its own, because threads communicate while the training does
        self.writing: Future[Any] | None = None

    def save(
        self,
        net: SparseNet,
        optimizer: Optimizer,
        config: Mapping[str, Any],
        rows: Sequence[Mapping[str, Any]],
        position: Position,
    ) -> None:
        """Begin to write the checkpoint at ``position``, when the one before it is written."""
        self.wait()
        notes = checkpoint.notes_for(net, config, rows, position, checkpoint.IN_PARTS)
        folder = folder_of(self.path, notes["step"])

        def publish(digests: dict[str, str]) -> None:
            checkpoint.publish(self.file, {}, notes | {"parts": json.dumps(digests)})
            checkpoint.remove_parts(self.path, keep=notes["step"])

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = async_save(
                checkpoint.tensors_of(net, optimizer),
                storage_writer=PartsWriter(folder, publish),
                process_group=self.group,
            )
        assert isinstance(found, Future)
        self.writing = found

    def wait(self) -> None:
        """Wait until the last checkpoint is written; an error of its thread is raised here."""
        writing, self.writing = self.writing, None
        try:
            if writing is not None:
                writing.result()
        except CheckpointException as error:
            reason = reason_of(error)
            if isinstance(reason, OSError):
                raise CannotWrite.at(self.path / checkpoint.PARTS, reason) from None
            raise reason from None

    def restore(self, net: SparseNet, optimizer: Optimizer, config: Mapping[str, Any]) -> Position:
        """Load the last checkpoint, in parts or whole, into a sharded network; return its position."""
        found = checkpoint.read_file(self.file)
        if found is None:
            if self.file.with_suffix(".json").exists():
                raise UnreadableFile(f"{self.file} is missing; restore it, or {ANEW}")
            return START
        notes = found.notes
        with naming_file(self.file, f"restore it, or {ANEW}", checkpoint.ERRORS):
            if "parts" in notes:
                check_parts(self.path, notes, dist.get_rank(), dist.get_world_size())
                tensors = self.read_parts(net, optimizer, notes)
            else:
                own = wanted(net, optimizer)
                tensors = {key: placed(tensor, own.get(key)) for key, tensor in found.tensors.items()}
        return Checkpoint(notes, tensors).load(self.file, net, optimizer, config)

    def read_parts(self, net: SparseNet, optimizer: Optimizer, notes: Mapping[str, str]) -> dict[str, Tensor]:
        """Read of every tensor what this process holds of it."""
        reader, own = reader_of(self.path, notes), wanted(net, optimizer)
        tensors = {
            key: torch.empty_like(own[key]) if is_sharded(own.get(key)) else empty(there)
            for key, there in tensors_in(reader).items()
        }
        with what_does_not_fit():
            load(tensors, storage_reader=reader, process_group=self.group)
        return tensors


def read_whole(path: Path, notes: Mapping[str, str]) -> dict[str, Tensor]:
    """Read a checkpoint in parts into whole tensors, in one process."""
    check_parts(path, notes)
    reader = reader_of(path, notes)
    tensors = {key: empty(there) for key, there in tensors_in(reader).items()}
    with warnings.catch_warnings(), what_does_not_fit():
        warnings.simplefilter("ignore")  # torch asks whether one process is meant
        load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def check_parts(path: Path, notes: Mapping[str, str], rank: int = 0, world: int = 1) -> None:
    """Refuse parts that are missing or not those that the notes name; each process looks at some of them."""
    folder, digests = folder_of(path, notes["step"]), json.loads(notes["parts"])
    if odd := [name for name in digests if not PART.fullmatch(name)]:
        raise ValueError(f"{odd[0]!r} is the name of no part")
    for name in sorted(digests)[rank::world]:
        with naming_file(folder / name, f"restore it, or {ANEW}"):
            if file_digest(folder / name) != digests[name]:
                raise ValueError("its checksum is wrong")
    if strange := {file.name for file in folder.glob(ANY_PART)} - set(digests):
        raise UnreadableFile(f"{folder} must hold its parts alone, has {min(strange)}; remove that file")


def reason_of(error: CheckpointException) -> BaseException:
    """Return why the first process failed; DCP's own exception holds all of it with tracebacks."""
    found: BaseException = next(iter(error.failures.values()))[0]
    return found


@contextmanager
def what_does_not_fit() -> Iterator[None]:
    """Turn what DCP raises where parts do not fit a network into a ValueError."""
    try:
        yield
    except CheckpointException as error:
        raise ValueError(str(reason_of(error))) from None
    except AssertionError as error:
        raise ValueError(str(error)) from None


def reader_of(path: Path, notes: Mapping[str, str]) -> HuggingFaceStorageReader:
    return HuggingFaceStorageReader(str(folder_of(path, notes["step"])))


def tensors_in(reader: HuggingFaceStorageReader) -> dict[str, TensorStorageMetadata]:
    """Return what the parts hold: name -> size and type of the whole tensor."""
    found = reader.read_metadata().state_dict_metadata
    return {key: there for key, there in found.items() if isinstance(there, TensorStorageMetadata)}


def empty(there: TensorStorageMetadata) -> Tensor:
    return torch.empty(there.size, dtype=there.properties.dtype)


def wanted(net: SparseNet, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return a tensor by which that of a checkpoint is placed: the net's own, and of the optimizer the parameter."""
    own = {f"net.{key}": value for key, value in net.state_dict().items()}
    for place, (parameter, key) in checkpoint.places_in(optimizer).items():
        if key != STEP:
            own[place] = parameter
    return own


def placed(tensor: Tensor, own: Tensor | None) -> Tensor:
    """Return this process's part of a whole tensor, where ``own`` is sharded."""
    return like(tensor.to(own.device), own) if is_sharded(own) else tensor


def file_digest(file: Path) -> str:
    found = hashlib.sha256()
    with file.open("rb") as opened:
        while block := opened.read(2**22):
            found.update(block)
    return found.hexdigest()


def folder_of(path: Path, step: str) -> Path:
    """Return the folder of the parts of a run's checkpoint at ``step``."""
    return path / checkpoint.PARTS / step
