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
from dcil.data import decode, imagefolder, images
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
    scaled = (pixels.astype(np.float64) / 255 - images.MEAN) / images.STD
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
    order = images.random_for(4, 6).permutation(11)
    flips = 0
    for place, row in enumerate(order.tolist()):
        random = images.random_for(4, 6, row)
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


# -- files and folders that are not what they seem ---------------------------------------------------------------------


def names_of(folder: Path, label: int = 0) -> list[str]:
    files = imagefolder.load(folder).train
    return [str(files.path(i).relative_to(files.folder)) for i in range(len(files)) if files.labels[i] == label]


@pytest.mark.parametrize("target", [".", "..", "../..", "deep", "/"])
def test_a_link_to_a_folder_above_multiplies_nothing(folder: Path, target: str) -> None:
    ant = folder / "train" / "ant"
    write(ant / "deep" / "x.png")
    before = names_of(folder)
    os.symlink(target, ant / "again")
    os.symlink("again", ant / "a-chain")
    assert names_of(folder) == before


def test_a_class_that_links_to_its_own_folder_is_empty(folder: Path) -> None:
    for split in ("train", "val"):
        os.symlink(".", folder / split / "dog")
    with pytest.raises(UserError, match="has no images of dog"):
        imagefolder.load(folder)


def test_linked_images_and_folders_outside_are_taken(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    outside = tmp_path_factory.mktemp("outside")
    write(outside / "more" / "x.png")
    os.symlink(outside / "more" / "x.png", folder / "train" / "ant" / "one.png")
    os.symlink(outside, folder / "train" / "ant" / "z")
    assert names_of(folder) == [*(f"ant/{i}.png" for i in range(3)), "ant/one.png", "ant/z/more/x.png"]


@pytest.mark.parametrize(
    "make", [os.mkfifo, lambda path: os.symlink("nowhere", path), lambda path: os.symlink(path, path)]
)
def test_only_regular_files_are_images(folder: Path, make) -> None:
    make(folder / "val" / "bee" / "9.png")
    with pytest.raises(UserError, match=r"val/bee/9\.png: an image must be a regular file"):
        imagefolder.load(folder)


def test_a_file_that_becomes_a_fifo_does_not_hang(folder: Path) -> None:
    dataset = tiny(folder)
    path = folder / "train" / "bee" / "2.png"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UserError, match=r"2\.png: not readable as an image \(not a regular file\)"):
        list(dataset.loader(2, "cpu", seed=0).train(0))
    path.unlink()
    with pytest.raises(UserError, match=r"2\.png: not readable as an image \(No such file or directory\)"):
        list(dataset.loader(2, "cpu", seed=0).train(0))


def test_names_that_are_not_utf8_and_long_ones(folder: Path) -> None:
    name = os.fsdecode(b"caf\xe9")
    for split in ("train", "val"):
        write(folder / split / name / f"{name}{'x' * 200}.png")
    loaded = tiny(folder)
    assert loaded.class_names == (*CLASSES[:2], name, "cat") or name in loaded.class_names
    assert len(joined(loaded.loader(4, "cpu", 0).train(0))[1]) == 12


def test_an_unreadable_folder_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scandir = os.scandir

    def denied(path):
        if str(path).endswith("bee"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(UserError, match="train/bee cannot be read: Permission denied"):
        imagefolder.load(folder)


def test_a_worker_that_ends_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "read_open", lambda file, most: os._exit(9))
    with pytest.raises(UserError, match="a process that decodes images") as caught:
        list(tiny(folder, workers=1).loader(4, "cpu", 0).train(0))
    assert "\n" not in str(caught.value)


# -- pixels ------------------------------------------------------------------------------------------------------------


def test_sixteen_bit_grey_keeps_its_greys(tmp_path: Path) -> None:
    grey = np.arange(256, dtype=np.uint8).reshape(16, 16)
    deep = grey.astype(np.uint16) * 256 + 77
    Image.fromarray(deep).save(tmp_path / "16.png")
    Image.fromarray(deep.astype(np.int32)).save(tmp_path / "16.ppm")
    Image.fromarray(grey).save(tmp_path / "8.png")
    for name in ("16.png", "16.ppm", "8.png"):
        assert np.array_equal(np.asarray(decode.read(tmp_path / name)), np.stack([grey] * 3, -1)), name


def test_every_mode_is_decoded_or_refused_by_name(tmp_path: Path) -> None:
    colours = Image.fromarray(np.random.default_rng(0).integers(0, 256, (9, 7, 3), np.uint8))
    for mode, suffix in [("1", "png"), ("L", "png"), ("LA", "png"), ("P", "png"), ("RGBA", "png"), ("CMYK", "jpg")]:
        path = tmp_path / f"{mode}.{suffix}"
        colours.convert(mode).save(path)
        assert decode.read(path).mode == "RGB"
    palette = colours.convert("P")
    palette.save(tmp_path / "transparent.png", transparency=bytes(range(256)))
    assert np.array_equal(np.asarray(decode.read(tmp_path / "transparent.png")), np.asarray(palette.convert("RGB")))
    for suffix in ("gif", "webp", "png"):
        moving = tmp_path / "moving.png"
        colours.save(moving, suffix, save_all=True, append_images=[colours.rotate(180)], lossless=True)
        assert decode.read(moving).size == (7, 9)
    for name, content in [
        ("empty.png", b""),
        ("float.ppm", b"Pf\n1 1\n-1.0\n0000"),
        ("text.jpg", b"%!PS-Adobe-3.0 EPSF"),
    ]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=f"{name}: not readable as an image"):
            decode.read(tmp_path / name)


def test_other_formats_are_not_even_tried(tmp_path: Path) -> None:
    Image.new("RGB", (4, 4)).save(tmp_path / "x.png", "TIFF")
    with pytest.raises(UserError, match=r"x\.png: not readable as an image \(cannot identify image file\)"):
        decode.read(tmp_path / "x.png")


def test_too_many_pixels_are_refused_by_the_header(tmp_path: Path) -> None:
    Image.new("1", (8000, 7000)).save(tmp_path / "bomb.png")
    with pytest.raises(UserError, match=r"bomb\.png: .* \(8000 x 7000 pixels, more than 50,000,000"):
        decode.read(tmp_path / "bomb.png")
    Image.new("1", (1, 300_000)).save(tmp_path / "long.png")
    with pytest.raises(UserError, match=r"long\.png: .* no side may have more than 262,144"):
        decode.read(tmp_path / "long.png")
    Image.new("RGB", (20, 20)).save(tmp_path / "small.png")
    with pytest.raises(UserError, match="more than 399"):
        decode.read(tmp_path / "small.png", 399)
    assert decode.read(tmp_path / "small.png", 400).size == (20, 20)


def test_scans_of_a_progressive_jpeg_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "x.jpg"
    Image.new("L", (64, 64)).save(path, progressive=True)
    assert decode.read(path).size == (64, 64)
    data = path.read_bytes()
    scan = data[data.rindex(b"\xff\xda") : -2]
    path.write_bytes(data[:-2] + scan * 200 + data[-2:])
    with pytest.raises(UserError, match="more than 100 scans"):
        decode.read(path)


@pytest.mark.parametrize("size", [(1, 20_000), (20_000, 1), (3, 900), (1, 1), (7, 2000)])
def test_long_images_are_cut_before_they_are_resized(size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The pixels are those of resizing first, to a level; the image in between is no larger than its parts."""
    column = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), np.uint8)
    image = Image.fromarray(column)
    made = decode.center_crop(image, 10, 8)
    monkeypatch.setattr(decode, "LONGEST", 10**9)
    whole = decode.center_crop(image, 10, 8)
    assert made.shape == whole.shape == (8, 8, 3)
    assert np.abs(made.astype(int) - whole.astype(int)).max() <= 1
