"""Image folders: what is found, how it is cut, and that only (seed, epoch, image) decide what a batch holds."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from dcil import data
from dcil.data import decode, imagefolder
from dcil.errors import UserError

CLASSES = ("ant", "bee", "cat")


def write(path: Path, width: int = 20, height: int = 14) -> Path:
    """A random image, the same for the same path below the split's folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    seed = sum(map(ord, "/".join(path.parts[-3:])))
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    Image.fromarray(pixels).save(path)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three classes with 3 + 4 + 4 training and 2 test images each."""
    for c, name in enumerate(CLASSES):
        for i in range(4 if c else 3):
            write(tmp_path / "train" / name / f"{i}.png", 16 + i, 12 + 3 * c)
        for i in range(2):
            write(tmp_path / "val" / name / f"{i}.png", 20 - 9 * i, 14)
    return tmp_path


def tiny(folder: Path, workers: int = 0) -> data.ImageFolder:
    return replace(imagefolder.load(folder), crop=8, resize=10, workers=workers)


def joined(batches: Iterator[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    x, y = zip(*batches, strict=True)
    return torch.cat(x), torch.cat(y)


def normalized(pixels: np.ndarray) -> Tensor:
    """(H, W, 3) bytes -> (3, H, W)."""
    scaled = (pixels.astype(np.float64) / 255 - imagefolder.MEAN) / imagefolder.STD
    return torch.from_numpy(scaled.astype(np.float32)).permute(2, 0, 1)


def test_the_common_surface(folder: Path) -> None:
    loaded = data.load("imagefolder", folder)
    assert (loaded.name, loaded.classes, loaded.shape, loaded.train_size) == ("imagefolder", 3, (3, 224, 224), 11)
    loader = tiny(folder).loader(4, "cpu", seed=0)
    assert (loader.steps, loader.device) == (3, torch.device("cpu"))
    batches = list(loader.train(0))
    assert [len(y) for _, y in batches] == [4, 4, 3]
    x, y = batches[0]
    assert x.shape == (4, 3, 8, 8) and x.dtype == torch.float32 and y.dtype == torch.int64
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert sorted(joined(iter(batches))[1].tolist()) == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]


def test_what_counts_as_an_image(folder: Path) -> None:
    ant = folder / "train" / "ant"
    for name in ("x.JPG", "x.Jpeg", "x.bmp", "x.webp", "x.ppm", "deep/er/x.png"):
        write(ant / name)
    write(ant / ".hidden.png")
    write(folder / "train" / ".ipynb_checkpoints" / "x.png")
    (ant / "notes.txt").write_text("no image")
    os.symlink(folder / "train" / "bee", ant / "linked")
    loaded = imagefolder.load(folder)
    found = [
        str(loaded.train.path(i).relative_to(ant)) for i in range(len(loaded.train)) if loaded.train.labels[i] == 0
    ]
    linked = [f"linked/{i}.png" for i in range(4)]
    pngs = [f"{i}.png" for i in range(3)]
    assert found == [*pngs, "deep/er/x.png", *linked, "x.JPG", "x.Jpeg", "x.bmp", "x.ppm", "x.webp"]
    assert loaded.class_names == CLASSES
    assert len(joined(tiny(folder).loader(4, "cpu", 0).train(0))[1]) == 11 + len(found) - 3


def test_test_in_place_of_val(folder: Path) -> None:
    (folder / "val").rename(folder / "test")
    assert len(imagefolder.load(folder).test) == 6
    write(folder / "val" / "ant" / "0.png")
    with pytest.raises(UserError, match="val lacks bee, cat"):  # ImageNet's own test images have no labels
        imagefolder.load(folder)


def test_different_classes_are_named(folder: Path) -> None:
    write(folder / "train" / "dog" / "0.png")
    (folder / "val" / "bee").rename(folder / "val" / "wasp")
    with pytest.raises(UserError) as caught:
        imagefolder.load(folder)
    assert f"{folder / 'train'} lacks wasp; {folder / 'val'} lacks bee, dog" in str(caught.value)


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (lambda folder: (folder / "train").rename(folder / "training"), "train does not exist"),
        (lambda folder: (folder / "val").rename(folder / "valid"), "val does not exist"),
        (lambda folder: [p.unlink() for p in (folder / "val" / "bee").iterdir()], "val has no images of bee"),
        (
            lambda folder: [p.rename(folder / p.name) for p in (folder / "train").iterdir()],
            "train has no class folders",
        ),
    ],
)
def test_missing_and_empty_folders(folder: Path, break_it, reason: str) -> None:
    break_it(folder)
    with pytest.raises(UserError) as caught:
        imagefolder.load(folder)
    message = str(caught.value)
    assert reason in message and "\n" not in message
    assert f"put images into {folder}/train/CLASS and {folder}/val/CLASS" in message


def test_without_pillow(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(UserError, match=r"Pillow .* pip install 'dcil\[data\]'"):
        imagefolder.load(folder)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("damage", ["no image", "truncated"])
def test_an_unreadable_file_is_named_in_one_line(folder: Path, workers: int, damage: str) -> None:
    bad = folder / "train" / "bee" / "2.png"
    bad.write_bytes(b"no image" if damage == "no image" else bad.read_bytes()[:-300])
    with pytest.raises(UserError) as caught:
        list(tiny(folder, workers).loader(2, "cpu", seed=0).train(0))
    message = str(caught.value)
    assert message.startswith(f"{bad}: not readable as an image (") and "\n" not in message
    assert message.count(str(bad)) == 1


def test_workers_change_nothing(folder: Path) -> None:
    alone, pair = (tiny(folder, workers).loader(4, "cpu", seed=7) for workers in (0, 2))
    for made, expected in ((pair.train(3), alone.train(3)), (pair.test(), alone.test())):
        for (x, y), (x_alone, y_alone) in zip(made, expected, strict=True):
            assert torch.equal(x, x_alone) and torch.equal(y, y_alone)


def test_an_epoch_depends_on_seed_and_epoch_only(folder: Path) -> None:
    walked, fresh, other = (tiny(folder).loader(4, "cpu", seed) for seed in (5, 5, 6))
    state = torch.get_rng_state()
    epochs = [joined(walked.train(epoch))[0] for epoch in range(3)]
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(1)
    np.random.seed(1)
    assert torch.equal(epochs[2], joined(fresh.train(2))[0])
    assert not torch.equal(epochs[1], epochs[2])
    assert not torch.equal(epochs[2], joined(other.train(2))[0])


def test_an_images_crop_does_not_depend_on_the_batch_size(folder: Path) -> None:
    small, large = (joined(tiny(folder).loader(batch, "cpu", seed=1).train(0)) for batch in (2, 11))
    assert torch.equal(small[0], large[0]) and torch.equal(small[1], large[1])


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_share_every_batch(folder: Path, world: int) -> None:
    dataset = tiny(folder)
    whole = dataset.loader(5, "cpu", seed=2)
    parts = [dataset.loader(5, "cpu", 2, rank, world) for rank in range(world)]
    assert {part.steps for part in parts} == {whole.steps} == {3}
    for made, expected in (([p.train(1) for p in parts], whole.train(1)), ([p.test() for p in parts], whole.test())):
        for (x, y), *shares in zip(expected, *made, strict=True):  # the last batch has one image: empty shares
            for rank, (x_rank, y_rank) in enumerate(shares):
                assert torch.equal(x_rank, x[rank::world]) and torch.equal(y_rank, y[rank::world])


def reference_box(width: int, height: int, random: np.random.Generator) -> tuple[int, int, int, int]:
    """torchvision's RandomResizedCrop.get_params, line by line, as (left, top, width, height)."""
    area = height * width
    log_ratio = (math.log(3.0 / 4.0), math.log(4.0 / 3.0))
    for _ in range(10):
        target_area = area * random.uniform(0.08, 1.0)
        aspect_ratio = math.exp(random.uniform(log_ratio[0], log_ratio[1]))
        w = round(math.sqrt(target_area * aspect_ratio))
        h = round(math.sqrt(target_area / aspect_ratio))
        if 0 < w <= width and 0 < h <= height:
            i = random.integers(0, height - h + 1)
            j = random.integers(0, width - w + 1)
            return j, i, w, h
    in_ratio = float(width) / float(height)
    if in_ratio < 3 / 4:
        w = width
        h = round(w / (3 / 4))
    elif in_ratio > 4 / 3:
        h = height
        w = round(h * (4 / 3))
    else:
        w, h = width, height
    return (width - w) // 2, (height - h) // 2, w, h


@pytest.mark.parametrize("size", [(500, 375), (375, 500), (33, 31), (400, 20), (7, 300), (1, 1), (1, 90), (90, 1)])
def test_crops_equal_the_reference(size: tuple[int, int]) -> None:
    for seed in range(50):
        ours, theirs = (np.random.default_rng(seed) for _ in range(2))
        left, top, width, height = box = decode.random_crop_box(*size, ours)
        assert box == reference_box(*size, theirs)
        assert left >= 0 and top >= 0 and left + width <= size[0] and top + height <= size[1]


def test_crops_that_never_fit_take_the_centre() -> None:
    never = np.random.default_rng(0)
    assert decode.random_crop_box(1000, 10, never) == (493, 0, 13, 10)
    assert decode.random_crop_box(10, 1000, never) == (0, 493, 10, 13)
    assert decode.center_crop_box(40, 40) == (0, 0, 40, 40)


def test_train_pixels_equal_crop_resize_flip(folder: Path) -> None:
    loader = tiny(folder).loader(11, "cpu", seed=4)
    [(x, _)] = loader.train(6)
    order = imagefolder._random(4, 6).permutation(11)
    flips = 0
    for place, row in enumerate(order.tolist()):
        random = imagefolder._random(4, 6, row)
        image = Image.open(loader.dataset.train.path(row)).convert("RGB")
        left, top, width, height = reference_box(*image.size, random)
        crop = image.crop((left, top, left + width, top + height)).resize((8, 8), Image.Resampling.BILINEAR)
        if random.random() < 0.5:
            crop, flips = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT), flips + 1
        torch.testing.assert_close(x[place], normalized(np.asarray(crop)))
    assert 0 < flips < 11


@pytest.mark.parametrize(("size", "resized"), [((20, 14), (14, 10)), ((9, 31), (10, 34)), ((10, 10), (10, 10))])
def test_test_pixels_are_the_centre_of_the_resized_image(
    folder: Path, size: tuple[int, int], resized: tuple[int, int]
) -> None:
    path = write(folder / "val" / "ant" / "0.png", *size)
    [(x, y)] = tiny(folder).loader(6, "cpu", seed=0).test()
    assert y.tolist() == [0, 0, 1, 1, 2, 2]
    pixels = np.asarray(Image.open(path).resize(resized, Image.Resampling.BILINEAR))
    left, top = (resized[0] - 8) // 2, (resized[1] - 8) // 2
    torch.testing.assert_close(x[0], normalized(pixels[top : top + 8, left : left + 8]))


def test_gray_and_transparent_images_become_rgb(folder: Path) -> None:
    for i, mode in enumerate(("L", "RGBA", "P", "1")):
        Image.new(mode, (12, 12), 1).save(folder / "val" / "ant" / f"mode{i}.png")
    assert joined(tiny(folder).loader(4, "cpu", 0).test())[0].shape == (10, 3, 8, 8)


def test_settings_that_cannot_work(folder: Path) -> None:
    dataset = tiny(folder)
    with pytest.raises(UserError, match="resize \\(10\\), got 11"):
        replace(dataset, crop=11)
    with pytest.raises(UserError, match="worker"):
        replace(dataset, workers=-1)
    with pytest.raises(UserError, match="batch size"):
        dataset.loader(0, "cpu", 0)
    assert 1 <= imagefolder.load(folder).workers <= 16
