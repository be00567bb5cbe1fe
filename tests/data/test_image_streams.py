"""Images in tar files, and damaged images: found before a run, or left out while it trains."""

from __future__ import annotations

import io
import json
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from test_imagefolder import joined, write

from dcil import data
from dcil.cli import main
from dcil.data import color_jitter, image_check, imagefolder, webdataset
from dcil.data.images import random_for
from dcil.errors import UserError


def encoded(seed: int, form: str = "png", size: tuple[int, int] = (20, 14)) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    Image.fromarray(pixels).save(file := io.BytesIO(), form)
    return file.getvalue()


def write_tar(path: Path, members: list[tuple[str, bytes]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def samples(first: int, count: int, classes: int = 3) -> list[tuple[str, bytes]]:
    """Images in two formats, their classes, and what else WebDataset keeps beside them."""
    found: list[tuple[str, bytes]] = []
    for i in range(first, first + count):
        suffix, form = (("jpg", "jpeg"), ("seg.png", "png"))[i % 2]
        found += [(f"a/{i:04}.{suffix}", encoded(i, form)), (f"a/{i:04}.json", b"{}")]
        found.insert(2 * (i % 3), (f"a/{i:04}.cls", b"%d\n" % (i % classes)))
    return found


@pytest.fixture
def tars(tmp_path: Path) -> Path:
    """Four tars of 7 and 5 training images, one of 6 test images."""
    for number in range(4):
        write_tar(tmp_path / "train" / f"{number:03}.tar", samples(100 * number, (7, 5)[number % 2]))
    write_tar(tmp_path / "val" / "000.tar", samples(900, 6))
    return tmp_path


def tiny(folder: Path, workers: int = 0, load=webdataset.load) -> data.ImageFolder:
    return replace(load(folder), crop=8, resize=10, workers=workers)


def test_tars_hold_the_images_of_folders(tars: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The same images, class by class, give the same test batches and the same training crops."""
    folder = tmp_path_factory.mktemp("folder")
    members = {file: dict(read_members(file)) for file in sorted(tars.rglob("*.tar"))}
    for file, found in members.items():
        for name, content in found.items():
            key = name.split("/")[1].split(".")[0]
            if name.endswith((".png", ".jpg")):
                label = int(found[f"a/{key}.cls"])
                path = folder / file.parent.name / str(label) / f"{key}.{name.rsplit('.')[-1]}"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
    ours, theirs = tiny(tars), tiny(folder, load=imagefolder.load)
    assert (ours.classes, ours.shape, ours.train_size, len(ours.test)) == (3, (3, 8, 8), 24, 6)
    (x, y), (a, b) = (joined(dataset.loader(4, "cpu", 0).test()) for dataset in (ours, theirs))
    for image, label in zip(a, b, strict=True):
        assert any(torch.equal(image, other) and label == its for other, its in zip(x, y, strict=True))
    assert sorted(y.tolist()) == sorted(b.tolist()) and data.load("webdataset", tars).train_size == 24


def read_members(file: Path) -> list[tuple[str, bytes]]:
    with tarfile.open(file) as tar:
        return [(member.name, tar.extractfile(member).read()) for member in tar]


@pytest.mark.parametrize(
    ("labels", "said"),
    [((1, 2, 3), "no image of class 0, the labels begin at 1: .* 4 outputs, 0 to 3"), ((2, 5), "class 0 and 3 more: ")],
)
def test_labels_are_taken_as_they_are_and_empty_classes_named(tmp_path: Path, labels, said: str) -> None:
    members = [(f"{c}.{end}", encoded(c) if end == "png" else b"%d" % c) for c in labels for end in ("png", "cls")]
    for name in ("train", "val"):
        write_tar(tmp_path / name / "0.tar", members)
    with pytest.warns(UserWarning, match=said) as warned:
        dataset = webdataset.load(tmp_path)
    assert dataset.classes == max(labels) + 1 and tuple(dataset.train.labels) == labels and len(warned) == 1


def test_an_epoch_shuffles_tars_and_within_a_buffer(tars: Path) -> None:
    files = replace(tiny(tars).train, buffer=3)
    orders = [files.order(random_for(0, epoch)) for epoch in range(20)]
    assert all(sorted(order) == list(range(24)) for order in orders)
    assert len({tuple(order) for order in orders}) == 20
    firsts = {int(np.searchsorted(files.first, order[0], side="right")) for order in orders}
    assert len(firsts) > 1
    for order in orders:  # tars follow each other, but for less than three places
        which = np.searchsorted(files.first, order, side="right")
        sequence = list(dict.fromkeys(which.tolist()))
        rows = np.concatenate([np.arange(files.first[t - 1], files.first[t]) for t in sequence])
        if len(sequence) == 4:
            places = np.argsort(order)[rows]
            assert np.abs(places - np.arange(24)).max() <= 12


def test_an_epoch_goes_on_anywhere_and_by_any_workers(tars: Path) -> None:
    whole = list(tiny(tars).loader(5, "cpu", seed=3).train(2))
    for workers, start in ((0, 2), (2, 3), (2, 0)):
        rest = list(tiny(tars, workers).loader(5, "cpu", seed=3).train(2, start))
        assert len(rest) == 5 - start
        for (x, y), (a, b) in zip(rest, whole[start:], strict=True):
            assert torch.equal(x, a) and torch.equal(y, b)
    parts = [list(tiny(tars).loader(5, "cpu", 3, rank, 2).train(2, 1)) for rank in range(2)]
    for (x, y), *shares in zip(whole[1:], *parts, strict=True):
        for rank, (a, b) in enumerate(shares):
            assert torch.equal(a, x[rank::2]) and torch.equal(b, y[rank::2])


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ([("a.jpg", b"x")], r"every sample must have an image and a class, a has no class \(a .cls file\)"),
        ([("a.cls", b"1")], "a has no image"),
        ([("a.jpg", b"x"), ("a.cls", b"cat")], r"a.cls must hold a whole number from 0 to 999999, holds b'cat'"),
        ([("a.jpg", b"x"), ("a.png", b"x"), ("a.cls", b"1")], "a has two images"),
        ([("a.jpg", b"x"), ("a.cls", b"1"), ("a.cls", b"2")], "a has two classes"),
        ([("a.txt", b"x")], "has no images"),
        (None, "not readable as a tar of images"),
        ([], "must have the classes of the training images, 0 to 2, has 3"),
    ],
)
def test_tars_that_cannot_be_used_are_named(tars: Path, members, reason: str) -> None:
    bad = tars / "train" / "001.tar"
    if members:
        write_tar(bad, members)
    elif members is None:
        bad.write_bytes(b"no tar" * 200)
    else:
        write_tar(tars / "val" / "000.tar", samples(0, 4, classes=4))
    with pytest.raises(UserError, match=reason) as caught:
        webdataset.load(tars)
    assert "\n" not in str(caught.value) and (str(bad) in str(caught.value) or members == [])


def test_no_tars_at_all(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train must hold tar files \(\*.tar, not compressed\), has none"):
        webdataset.load(tmp_path)


# -- colours ---------------------------------------------------------------------------------------------------------


def by_hand(x: np.ndarray, b: float, c: float, s: float) -> np.ndarray:
    """torchvision's adjust_brightness, adjust_contrast and adjust_saturation of one image (H, W, 3)."""

    def blend(one, other, ratio):
        return (ratio * one + (1 - ratio) * other).clip(0, 1)

    def grey(x):
        return (x @ np.array([0.2989, 0.587, 0.114]))[..., None]

    x = blend(x, np.zeros_like(x), b)
    x = blend(x, np.full_like(x, grey(x).mean()), c)
    return blend(x, grey(x) * np.ones(3), s)


def test_colours_change_as_the_formula_says(tars: Path) -> None:
    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (5, 6, 4, 3), np.uint8))
    factors = color_jitter.draw(5, 0.9, np.random.default_rng(1))
    found = color_jitter.jitter(pixels, factors)
    for image, row, x in zip(pixels.numpy(), factors.tolist(), found, strict=True):
        torch.testing.assert_close(x, torch.from_numpy(255 * by_hand(image / 255, *row)).float(), rtol=0, atol=2e-3)
    assert torch.allclose(color_jitter.jitter(pixels, torch.ones(5, 3)), pixels.float(), atol=1e-4)
    assert ((factors >= 0.1) & (factors <= 1.9)).all() and factors.unique().numel() == 15


def test_colours_depend_on_seed_epoch_and_image_alone(tars: Path) -> None:
    plain = list(tiny(tars).loader(5, "cpu", 3).train(2))
    changed = replace(tiny(tars), color_jitter=0.4)
    whole = list(changed.loader(5, "cpu", 3).train(2))
    assert all(torch.equal(y, b) and not torch.allclose(x, a) for (x, y), (a, b) in zip(whole, plain, strict=True))
    rest = list(replace(changed, workers=2).loader(5, "cpu", 3).train(2, 2))
    assert all(torch.equal(x, a) for (x, _), (a, _) in zip(rest, whole[2:], strict=True))
    for rank in range(2):
        for (x, _), (a, _) in zip(changed.loader(5, "cpu", 3, rank, 2).train(2), whole, strict=True):
            torch.testing.assert_close(x, a[rank::2], rtol=0, atol=1e-5)
    assert joined(changed.loader(5, "cpu", 3).test())[0].equal(joined(tiny(tars).loader(5, "cpu", 3).test())[0])


def test_a_run_takes_the_colours_of_its_config(tars: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(data.DATASETS, "webdataset", lambda where, fetch: tiny(where))
    words = ["train", "--data-dir", str(tars), "--model", "resnet8-digits", "--epochs", "1", "--batch", "6"]
    words += ["--device", "cpu", "--color-jitter", "0.4"]
    losses = []
    for strength in ("0.4", "0"):
        run = tmp_path / strength
        assert main([*words, "--dataset", "webdataset", "--color-jitter", strength, "--out", str(run)]) == 0
        losses.append(json.loads((run / "metrics.jsonl").read_text())["train_loss"])
        assert json.loads((run / "config.json").read_text())["color_jitter"] == float(strength)
    assert losses[0] != losses[1]
    assert main([*words, "--dataset", "digits", "--out", str(tmp_path / "digits")]) == 2
    assert "--color-jitter must be 0 for digits, got 0.4" in capsys.readouterr().err


# -- damaged images ----------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes of six training and two test images; of three training images the end, the middle or all is gone."""
    for c in range(2):
        for i in range(6):
            write(tmp_path / "train" / f"c{c}" / f"{i}.{'jpg' if i % 2 else 'png'}")
        for i in range(2):
            write(tmp_path / "val" / f"c{c}" / f"{i}.png")
    damage(tmp_path / "train" / "c0" / "2.png", slice(0, -200))
    damage(tmp_path / "train" / "c1" / "3.jpg", slice(0, -200))
    damage(tmp_path / "train" / "c1" / "0.png", slice(0, 0))
    return tmp_path


def damage(path: Path, kept: slice) -> None:
    path.write_bytes(path.read_bytes()[kept])


BAD = ("c0/2.png", "c1/0.png", "c1/3.jpg")


@pytest.mark.parametrize("decoding", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_all_damaged_images_are_found(folder: Path, decoding: bool, workers: int) -> None:
    found = data.find_damaged(tiny(folder, workers, imagefolder.load), decoding)
    assert [reason.split(": ")[0] for reason in found] == [str(folder / "train" / name) for name in BAD]
    with pytest.raises(UserError, match="mend or remove them, or leave such images out with --damaged skip") as caught:
        data.refuse_damaged(found)
    assert "\n" not in str(caught.value)


def test_processes_look_at_parts_that_are_all_images(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr(image_check, "CHUNK", 2)
    dataset = tiny(folder, load=imagefolder.load)
    parts = [data.find_damaged(dataset, True, part, 4) for part in range(4)]
    assert (
        sorted(reason for found in parts for reason in found) == data.find_damaged(dataset, True)
        and sum(map(bool, parts)) > 1
    )


def test_the_ends_do_not_show_what_is_wrong_in_the_middle(tmp_path: Path) -> None:
    for split in ("train", "val"):
        path = write(tmp_path / split / "a" / "0.png", 200, 200)
    content = bytearray(path.read_bytes())
    content[2000:3000] = bytes(1000)
    path.write_bytes(content)
    dataset = tiny(tmp_path, load=imagefolder.load)
    assert not data.find_damaged(dataset, decoding=False) and len(data.find_damaged(dataset, decoding=True)) == 1


def test_damaged_images_are_left_out(folder: Path) -> None:
    """Of each batch, whichever process decodes it; the others are cut as ever."""
    skipping = [replace(tiny(folder, w, imagefolder.load), skip_damaged=True).loader(4, "cpu", 1) for w in (0, 2)]
    with pytest.warns(UserWarning, match="left out of its batch") as warned:
        batches, others = (list(loader.train(0)) for loader in skipping)
        again = list(skipping[0].train(0))
    assert len(warned) == 6  # once by each loader
    assert sum(len(y) for _, y in batches) == 9 and len(batches) == 3
    for (x, y), (a, b), (c, d) in zip(batches, others, again, strict=True):
        assert torch.equal(x, a) and torch.equal(y, b) and torch.equal(x, c) and torch.equal(y, d)
    for name in BAD:
        write(folder / "train" / name)
    mended, labels = joined(tiny(folder, load=imagefolder.load).loader(4, "cpu", 1).train(0))
    for image, label in zip(*joined(iter(batches)), strict=True):
        assert any(torch.equal(image, other) and label == its for other, its in zip(mended, labels, strict=True))


def test_a_batch_of_nothing_but_damaged_images_ends_the_run(folder: Path) -> None:
    with pytest.raises(UserError, match="not readable as an image"):
        list(replace(tiny(folder, load=imagefolder.load), skip_damaged=True).loader(1, "cpu", 1).train(0))


def test_a_run_checks_its_images_first(folder: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(data.DATASETS, "imagefolder", lambda where, fetch: tiny(where, load=imagefolder.load))
    words = [
        "train",
        "--dataset",
        "imagefolder",
        "--data-dir",
        str(folder),
        "--model",
        "resnet8-digits",
        "--epochs",
        "1",
    ]
    words += ["--batch", "6", "--device", "cpu", "--out", str(tmp_path / "run")]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and all(name in said for name in BAD) and "--damaged skip" in said
    assert not (tmp_path / "run").exists()
    assert main([*words, "--check-images", "none"]) == 2
    assert sum(name in capsys.readouterr().err for name in BAD) <= 1
    with pytest.warns(UserWarning, match="left out of its batch"):
        assert main([*words, "--damaged", "skip"]) == 0
    out = capsys.readouterr().out
    assert all(f"left out: {folder / 'train' / name}" in out for name in BAD)
    damage(folder / "val" / "c1" / "0.png", slice(0, -200))
    assert main(["eval", str(tmp_path / "run"), "--data-dir", str(folder)]) == 2
    assert "c1/0.png: not readable as an image" in capsys.readouterr().err
    with pytest.warns(UserWarning, match=r"c1/0.png.*left out of its batch"):
        assert main(["eval", str(tmp_path / "run"), "--data-dir", str(folder), "--damaged", "skip"]) == 0
