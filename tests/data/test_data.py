"""Data sets load checked or not at all; the loader's batches equal a slow and obvious reference."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import tarfile
from hashlib import md5, sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from dcil import data
from dcil.data import cifar, download
from dcil.data.cifar import File, Source
from dcil.errors import UserError


def digest(records: np.ndarray) -> str:
    return sha256(b"".join(sorted(sha256(r.tobytes()).digest() for r in records))).hexdigest()


def tiny(source: Source, folder: Path) -> Source:
    """`source` with ten random records in every file, written into `folder`."""
    random = np.random.default_rng(0)
    folder.mkdir(parents=True)

    def write(file: File) -> File:
        records = random.integers(0, 256, (10, source.label_bytes + 3072), np.uint8)
        records[:, : source.label_bytes] = np.arange(10)[:, None] + 10 * np.arange(source.label_bytes)
        records.tofile(folder / file.name)
        return File(file.name, 10, digest(records))

    train, test = (tuple(write(file) for file in files) for files in (source.train, source.test))
    return dataclasses.replace(source, train=train, test=test)


@pytest.fixture(params=[cifar.CIFAR10, cifar.CIFAR100], ids=["cifar10", "cifar100"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Source:
    return tiny(request.param, tmp_path / request.param.folder)


def image_of(source: Source, folder: Path, label: int) -> Tensor:
    """The image of a label in the first training file, read byte by byte."""
    raw = (folder / source.train[0].name).read_bytes()
    size = source.label_bytes + 3072
    [start] = [i for i in range(0, len(raw), size) if raw[i + source.label_bytes - 1] == label]
    pixels = raw[start + source.label_bytes : start + size]
    return torch.tensor([[[pixels[c * 1024 + y * 32 + x] for x in range(32)] for y in range(32)] for c in range(3)])


def test_cifar_reads_the_last_label_and_the_planes(source: Source, tmp_path: Path) -> None:
    loaded = cifar.load(source, tmp_path, fetch=None)
    assert loaded.train.images.dtype == torch.uint8 and loaded.train.labels.dtype == torch.int64
    assert loaded.train.images.shape == (10 * len(source.train), 3, 32, 32) and len(loaded.test) == 10
    first = 10 * (source.label_bytes - 1)  # CIFAR-100's fine labels were written ten above the coarse ones
    assert sorted(loaded.test.labels.tolist()) == list(range(first, first + 10))
    row = loaded.train.labels[:10].tolist().index(first + 3)
    assert torch.equal(loaded.train.images[row], image_of(source, tmp_path / source.folder, first + 3))


def test_record_order_does_not_matter(source: Source, tmp_path: Path) -> None:
    before = cifar.load(source, tmp_path, fetch=None)
    path = tmp_path / source.folder / source.train[0].name
    np.fromfile(path, np.uint8).reshape(10, -1)[::-1].tofile(path)
    after = cifar.load(source, tmp_path, fetch=None)
    assert torch.equal(before.train.images, after.train.images)
    assert torch.equal(before.train.labels, after.train.labels)


@pytest.mark.parametrize("position", [0, -1], ids=["label", "pixel"])
def test_an_altered_file_is_refused_by_name(source: Source, tmp_path: Path, position: int) -> None:
    path = tmp_path / source.folder / source.test[0].name
    raw = bytearray(path.read_bytes())
    raw[position] ^= 1
    path.write_bytes(raw)
    with pytest.raises(UserError, match=f"{path} must have the published content"):
        cifar.load(source, tmp_path, fetch=None)


def test_a_truncated_file_is_refused_by_name_and_size(source: Source, tmp_path: Path) -> None:
    path = tmp_path / source.folder / source.test[0].name
    whole = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(UserError, match=f"{path} must have {whole} bytes, found {whole - 5}"):
        cifar.load(source, tmp_path, fetch=None)


def pack(source: Source, origin: Path, archive: Path) -> None:
    """The published archive's shape: the files in their folder, beside others and one that would escape."""
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(origin / source.folder, source.folder)
        tar.add(__file__, "../escaped.py")
        tar.add(__file__, f"{source.folder}/readme.html")


def test_download_takes_only_the_missing_files(source: Source, tmp_path: Path) -> None:
    archive, target = tmp_path / "archive.tar.gz", tmp_path / "new" / "place"
    pack(source, tmp_path, archive)
    kept = target / source.folder / source.test[0].name
    kept.parent.mkdir(parents=True)
    kept.write_bytes((tmp_path / source.folder / kept.name).read_bytes())
    stamp = kept.stat().st_mtime_ns
    asked: list[tuple[str, str]] = []

    def fetch(url: str, known_hash: str, folder: Path) -> Path:
        asked.append((url, known_hash))
        return archive

    loaded = cifar.load(source, target, fetch)
    assert len(loaded.train) == 10 * len(source.train)
    assert asked == [(source.url, source.archive_hash)]
    assert kept.stat().st_mtime_ns == stamp
    wanted = {file.name for file in source.train + source.test}
    assert {path.name for path in tmp_path.joinpath("new").rglob("*") if path.is_file()} == wanted
    assert [path.name for path in target.iterdir()] == [source.folder]
    cifar.load(source, target, fetch=None)


def no_network(url: str, known_hash: str, folder: Path) -> Path:
    (folder / "half").write_bytes(b"half")
    raise ConnectionError("no\nnetwork")


def not_an_archive(url: str, known_hash: str, folder: Path) -> Path:
    (folder / "page").write_bytes(b"<html>")
    return folder / "page"


def archive_without_files(url: str, known_hash: str, folder: Path) -> Path:
    tarfile.open(folder / "empty", "w:gz").close()
    return folder / "empty"


@pytest.mark.parametrize("fetch", [None, no_network, not_an_archive, archive_without_files])
def test_a_failed_download_is_one_line_and_leaves_nothing(fetch: download.Fetch | None, tmp_path: Path) -> None:
    target = tmp_path / "data"
    with pytest.raises(UserError) as caught:
        cifar.load(cifar.CIFAR100, target, fetch)
    message = str(caught.value)
    assert "\n" not in message
    assert f"put train.bin, test.bin from {cifar.CIFAR100.url} into {target / 'cifar-100-binary'}" in message
    assert not target.exists() or not list(target.iterdir())


def test_fetch_checks_the_hash_and_fills_the_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real `fetch`, with only the connection replaced."""
    import requests

    content = bytes(range(256)) * 4096

    class Response:
        def __init__(self) -> None:
            self.headers = {"content-length": str(len(content))}

        def raise_for_status(self) -> None: ...

        def close(self) -> None: ...

        def iter_content(self, chunk_size: int) -> list[bytes]:
            return [content[i : i + chunk_size] for i in range(0, len(content), chunk_size)]

    monkeypatch.setattr(requests, "get", lambda *args, **kwargs: Response())
    url = "https://example.org/archive.tar.gz"
    good = download.fetch(url, f"md5:{md5(content).hexdigest()}", tmp_path / "good")
    assert good.read_bytes() == content and good.name == "archive.tar.gz"
    with pytest.raises(ValueError, match="hash"):
        download.fetch(url, "md5:" + "0" * 32, tmp_path / "bad")
    assert not list((tmp_path / "bad").iterdir())


def test_digits_split() -> None:
    from sklearn.datasets import load_digits

    loaded, raw = data.load("digits", Path("nowhere")), load_digits()
    assert (len(loaded.train), len(loaded.test)) == (1437, 360)
    assert loaded.test.labels.tolist() == raw.target[::5].tolist()
    restored = loaded.test.images.double().squeeze(1) * 16 / 255
    assert np.abs(restored.numpy() - raw.images[::5]).max() <= 0.5 * 16 / 255
    assert (loaded.test.images.min(), loaded.test.images.max()) == (0, 255)
    assert (loaded.pad, loaded.flip, loaded.classes) == (1, False, 10)


def test_names_and_unknown_names() -> None:
    images = ["digits", "cifar10", "cifar100", "imagefolder", "webdataset"]
    assert data.names() == [*images, "text", "shakespeare", "pydoc"]
    with pytest.raises(UserError, match="unknown dataset 'cifar-10': did you mean 'cifar10'"):
        data.load("cifar-10", Path())


def test_importing_data_imports_no_reader_of_files() -> None:
    program = "import sys, dcil.data; sys.exit(bool({'sklearn', 'pooch', 'rich', 'PIL'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def random_dataset(n: int = 23, pad: int = 2, flip: bool = True) -> data.Dataset:
    generator = torch.Generator().manual_seed(1)

    def split(n: int) -> data.Split:
        images = torch.randint(256, (n, 3, 5, 7), generator=generator, dtype=torch.uint8)
        return data.Split(images, torch.arange(n))

    mean, std = (0.1, 0.5, 0.9), (0.2, 0.3, 0.4)
    return data.Dataset("random", split(n), split(9), n, mean, std, pad, flip)


def normalized(dataset: data.Dataset, image: Tensor) -> Tensor:
    channels = [(image[c].float() / 255 - dataset.mean[c]) / dataset.std[c] for c in range(3)]
    return torch.stack(channels)


@pytest.mark.parametrize(("pad", "flip"), [(2, True), (1, False), (0, True)])
def test_crop_and_flip_equal_a_per_image_reference(pad: int, flip: bool) -> None:
    dataset = random_dataset(pad=pad, flip=flip)
    loader = data.Loader(dataset, batch=8, device="cpu", seed=3)
    order, tops, lefts, flips = (drawn.tolist() for drawn in loader.draw(4))
    x = torch.cat([x for x, _ in loader.train(4)])
    y = torch.cat([y for _, y in loader.train(4)])
    assert x.dtype == torch.float32 and sorted(y.tolist()) == list(range(23)) and y.tolist() == order
    for i, (source, top, left, mirrored) in enumerate(zip(order, tops, lefts, flips, strict=True)):
        image = torch.zeros(3, 5 + 2 * pad, 7 + 2 * pad, dtype=torch.uint8)
        image[:, pad : pad + 5, pad : pad + 7] = dataset.train.images[source]
        crop = image[:, top : top + 5, left : left + 7]
        torch.testing.assert_close(x[i], normalized(dataset, crop.flip(2) if mirrored else crop))


def test_every_crop_and_both_flips_occur_equally_often() -> None:
    loader = data.Loader(random_dataset(n=5000), batch=8, device="cpu", seed=0)
    _, top, left, flip = loader.draw(0)
    counts = torch.bincount((top * 5 + left) * 2 + flip, minlength=50)
    assert len(counts) == 50 and counts.min() > 50 and counts.max() < 150
    assert not data.Loader(random_dataset(flip=False), 8, "cpu", 0).draw(0)[3].any()


def test_an_epoch_depends_on_seed_and_epoch_only() -> None:
    dataset = random_dataset()
    walked, fresh, other = (data.Loader(dataset, 8, "cpu", seed) for seed in (5, 5, 6))
    torch.manual_seed(0)
    epochs = [torch.cat([x for x, _ in walked.train(epoch)]) for epoch in range(3)]
    torch.manual_seed(1)
    assert torch.equal(epochs[2], torch.cat([x for x, _ in fresh.train(2)]))
    assert not torch.equal(epochs[1], epochs[2])
    assert not torch.equal(epochs[2], torch.cat([x for x, _ in other.train(2)]))
    # seed + epoch would make these two the same
    assert not torch.equal(walked.draw(2)[0], other.draw(1)[0])


def test_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    list(data.Loader(random_dataset(), 8, "cpu", 0).train(0))
    assert torch.equal(before, torch.get_rng_state())


def test_steps_and_batch_sizes() -> None:
    loader = data.Loader(random_dataset(), batch=8, device="cpu", seed=0)
    assert loader.steps == 3
    assert [len(y) for _, y in loader.train(0)] == [8, 8, 7]
    assert data.Loader(random_dataset(n=24), 8, "cpu", 0).steps == 3
    with pytest.raises(UserError, match="batch"):
        data.Loader(random_dataset(), 0, "cpu", 0)


def test_test_batches_are_the_plain_images_in_order() -> None:
    dataset = random_dataset()
    batches = list(data.Loader(dataset, batch=4, device="cpu", seed=0).test())
    assert [len(y) for _, y in batches] == [4, 4, 1]
    expected = torch.stack([normalized(dataset, image) for image in dataset.test.images])
    torch.testing.assert_close(torch.cat([x for x, _ in batches]), expected)
    assert torch.cat([y for _, y in batches]).tolist() == list(range(9))


def test_the_common_surface() -> None:
    dataset = random_dataset()
    assert (dataset.shape, dataset.train_size) == ((3, 5, 7), 23)
    made, direct = dataset.loader(8, "cpu", 3), data.Loader(dataset, 8, "cpu", 3)
    assert isinstance(made, data.Loader) and made.steps == 3
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(made.train(1), direct.train(1), strict=True))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_share_every_batch(world: int) -> None:
    dataset = random_dataset(n=22)  # the last training batch has one image, so some ranks have none of it
    whole = data.Loader(dataset, 7, "cpu", seed=2)
    parts = [data.Loader(dataset, 7, "cpu", 2, rank, world) for rank in range(world)]
    assert {part.steps for part in parts} == {whole.steps} == {4}
    for made, expected in (([p.train(1) for p in parts], whole.train(1)), ([p.test() for p in parts], whole.test())):
        for (x, y), *shares in zip(expected, *made, strict=True):
            for rank, (x_rank, y_rank) in enumerate(shares):
                assert torch.equal(x_rank, x[rank::world]) and torch.equal(y_rank, y[rank::world])


@pytest.mark.parametrize(("rank", "world"), [(2, 2), (-1, 2), (0, 0), (0, 9)])
def test_ranks_that_cannot_be(rank: int, world: int) -> None:
    with pytest.raises(UserError, match="processes"):
        data.Loader(random_dataset(), 8, "cpu", 0, rank, world)
