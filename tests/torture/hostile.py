"""Plans and images that are made to take all memory or time: refused, or done within bounds."""

from __future__ import annotations

import hashlib
import json
import os
import random
import struct
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from forks import isolated
from PIL import Image
from samples import Samples, scratch
from tally import WRONG, Case, Verdict, of_outcome

from dcil.data import imagefolder
from dcil.errors import UserError
from dcil_runtime import PlanError, load
from dcil_runtime.format import HEADER, MAGIC, VERSION
from dcil_runtime.native import LIBRARY

#: Beyond what the harness itself has mapped: seconds, and bytes of memory.
LIMIT, MEMORY = 15.0, 2 << 30


def mapped() -> int:
    """Return the bytes of address space that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")


def cases(samples: Samples, chance: random.Random, factor: float) -> Iterator[Case]:
    if LIBRARY.exists():
        for name, plan in plans(chance, round(30 * factor)):
            yield f"plan: {name}", partial(run_plan, plan)
    for name, make in IMAGES.items():
        for split in ("train", "val"):
            yield f"image in {split}: {name}", partial(read_images, make, split)


# -- plans -------------------------------------------------------------------------------------------------------------


def op(kind: str, *inputs: int, window: tuple[int, ...] = (), **fields: Any) -> dict[str, Any]:
    """One operator of a plan's META."""
    usual = {"window": window or (1, 1, 1, 1, 0, 0, 0, 0, 1, 1), "groups": 1, "count_pad": 0, "residual": -1}
    none = ["none", 0.0, 0.0]
    return {"kind": kind, "inputs": inputs, **usual, "act": none, "twin": 0, "twin_act": none, "arrays": {}, **fields}


def plans(chance: random.Random, count: int) -> Iterator[tuple[str, bytes]]:
    """Yield the known bombs, and random ones of their kinds."""
    yield "window of 1000 x 1000", sealed((1, 1000, 1000), [pool(1000, 1, 500)])
    yield "paddings of 2047", sealed((64, 8, 8), [pool(3, 1, 2047)])
    yield "400 layers of one array", shared(400, 1024)
    yield "doubling", sealed((64, 32, 32), [op("concat", i, i) for i in range(24)])
    yield "a long chain", sealed((4, 64, 64), [op("map", i) for i in range(20_000)])
    yield "a large input", sealed((4096, 4096, 4096), [op("mean", 0)])
    for _ in range(count):
        size, side = chance.choice([1, 8, 64, 512]), chance.choice([1, 8, 100, 1000, 4000])
        kernel, pad = chance.choice([1, 3, 100, 2000]), chance.choice([0, 1, 100, 2047])
        if chance.random() < 0.3:
            layers, width = chance.choice([50, 300]), chance.choice([256, 1500])
            yield f"{layers} layers of {width} that share an array", shared(layers, width)
        else:
            depth = chance.choice([1, 2, 5])
            layers = [pool(kernel, chance.choice([1, 2]), min(pad, kernel), i) for i in range(depth)]
            layers[0] = pool(kernel, 1, pad)
            yield f"{depth} pools of {kernel}, padding {pad}, on {size} x {side}²", sealed((size, side, side), layers)


def pool(kernel: int, stride: int, pad: int, source: int = 0) -> dict[str, Any]:
    return op("avgpool", source, window=(kernel, kernel, stride, stride, pad, pad, pad, pad, 1, 1), count_pad=1)


def shared(layers: int, width: int) -> bytes:
    """Linear layers that all name the same bytes as their weight."""
    data = np.ones(width * width, "<f4").tobytes()
    arrays = {"weight": [0, width * width]}
    return sealed((width, 1, 1), [op("linear", i, arrays=arrays) for i in range(layers)], data, ranks=(2, 2))


def sealed(shape: tuple[int, int, int], ops: list[Any], data: bytes = b"", ranks: tuple[int, int] = (4, 4)) -> bytes:
    """Return a plan whose checksum is right, whatever it says."""
    text = json.dumps({"input": shape, "ranks": ranks, "notes": {}, "ops": ops}).encode()
    digest = hashlib.sha256(text + data).digest()
    return HEADER.pack(MAGIC, VERSION, 0, len(text), len(data), digest) + text + data


def run_plan(raw: bytes) -> Verdict:
    with scratch() as folder:
        file = folder / "plan.dcil"
        file.write_bytes(raw)

        def run() -> int:
            try:
                plan = load(file, threads=2)
                plan(np.zeros((1, *plan.input_shape), np.float32))
            except PlanError as error:
                sys.stderr.write(f"dcil: {error}\n")
                return 2
            return 0

        return of_outcome(isolated(run, LIMIT, mapped() + MEMORY))


# -- images ------------------------------------------------------------------------------------------------------------


def png(width: int, height: int, depth: int = 8, row: bytes | None = None) -> bytes:
    """Return a grey PNG without ever holding its pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    packer = zlib.compressobj(9)
    line = b"\0" + (row or bytes(width * depth // 8))
    body = b"".join([*(packer.compress(line) for _ in range(height)), packer.flush()])
    header = struct.pack(">IIBBBBB", width, height, depth, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def grey16(file: Path) -> None:
    ramp = np.linspace(0, 65535, 64).astype(">u2").tobytes()
    file.write_bytes(png(64, 64, 16, ramp))


#: What is put among the images, and how.
IMAGES: dict[str, Callable[[Path], object]] = {
    "1 x 20,000 pixels": lambda file: file.write_bytes(png(1, 20_000)),
    "20,000 x 1 pixels": lambda file: file.write_bytes(png(20_000, 1)),
    "169 megapixels": lambda file: file.write_bytes(png(13_000, 13_000)),
    "3 x 60,000 pixels": lambda file: file.write_bytes(png(60_000, 3)),
    "a FIFO": os.mkfifo,
    "a folder": Path.mkdir,
    "a link to itself": lambda file: file.symlink_to(file),
    "a link to the folder above": lambda file: file.with_suffix("").symlink_to(file.parent.parent),
    "a link to its own folder": lambda file: file.with_suffix("").symlink_to(file.parent),
    "a broken link": lambda file: file.symlink_to("nothing"),
    "no bytes": lambda file: file.write_bytes(b""),
    "text": lambda file: file.write_text("not an image"),
    "a cut image": lambda file: file.write_bytes(png(64, 64)[:60]),
    "a header that lies": lambda file: file.write_bytes(
        png(64, 64).replace(struct.pack(">I", 64), b"\x7f\xff\xff\xff", 1)
    ),
    "16-bit grey": grey16,
    "unreadable": lambda file: (file.write_bytes(png(8, 8)), file.chmod(0)),
}


def read_images(make: Callable[[Path], object], split: str) -> Verdict:
    with scratch() as folder:
        for part, name in (("train", "ant"), ("train", "bee"), ("val", "ant"), ("val", "bee")):
            (folder / part / name).mkdir(parents=True)
            for i in range(3):
                pixels = np.random.default_rng(i).integers(0, 256, (40, 40, 3), np.uint8)
                Image.fromarray(pixels).save(folder / part / name / f"{i}.png")
        make(folder / split / "ant" / "x.png")
        outcome = isolated(partial(count_images, folder), LIMIT, mapped() + MEMORY)
        verdict = of_outcome(outcome)
        if outcome.code == 3:
            return Verdict(WRONG, outcome.out.strip())
        return verdict


def count_images(folder: Path) -> int:
    """Read every image; seven of a split at most, and none of them all white."""
    try:
        images = replace(imagefolder.load(folder), workers=0)
        loader = images.loader(4, "cpu", 0)
        for batches in (loader.train(0), loader.test()):
            seen = 0
            for x, _ in batches:
                seen += len(x)
                if any(float(image.min()) > 2 for image in x):
                    print("an image became white")  # noqa: T201
                    return 3
            if seen > 7:
                print(f"{seen} images of 7")  # noqa: T201
                return 3
    except (UserError, OSError) as error:  # of the latter, the command line makes one line too
        sys.stderr.write(f"dcil: {error}\n")
        return 2
    return 0
