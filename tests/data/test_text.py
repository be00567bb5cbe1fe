"""Texts: tokens, split and sequences equal a slow and obvious reference; what cannot be a text is said in one line."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
import torch

from dcil import data
from dcil.data import Sequences, Text, TextLoader, texts
from dcil.errors import UserError

LINES = "".join(f"{i} größer als {i - 1}, sagte der Zähler\n" for i in range(40))


def text(content: str | bytes = LINES) -> Text:
    return Text("text", "count.txt", content if isinstance(content, bytes) else content.encode())


def sequences(length: int = 8, tokens: str = "characters", content: str | bytes = LINES) -> Sequences:
    return text(content).sequences(tokens, length)


def loader(batch: int = 4, seed: int = 0, rank: int = 0, world: int = 1, **how: object) -> TextLoader:
    return sequences(**how).loader(batch, "cpu", seed, rank, world)  # type: ignore[arg-type]


def test_a_character_is_a_token_numbered_in_unicode_order() -> None:
    found = sequences(2, content="banana über alles " * 4)
    vocabulary = sorted(set("banana über alles "))
    assert found.vocabulary == "".join(vocabulary) and found.classes == len(vocabulary)
    assert found.ids.tolist() == [vocabulary.index(c) for c in "banana über alles " * 4]


def test_a_byte_is_a_token_of_256() -> None:
    content = bytes(range(256)) * 2  # no UTF-8
    found = sequences(2, "bytes", content)
    assert found.classes == 256 and found.vocabulary is None
    assert bytes(found.ids.tolist()) == content


def test_the_first_nine_tenths_train() -> None:
    for tokens, content in (("characters", LINES), ("bytes", LINES.encode())):
        found = sequences(4, tokens)
        cut = int(0.9 * len(content))  # nanoGPT's
        assert len(found.ids) == len(content) and len(found.train_ids) == cut
        assert found.train_ids.tolist() + found.validation_ids.tolist() == found.ids.tolist()


def test_bytes_per_token_are_those_of_the_part_that_validates() -> None:
    assert sequences(4, "bytes").bytes_per_token == 1.0
    part = LINES[int(0.9 * len(LINES)) :]
    assert sequences(4).bytes_per_token == pytest.approx(len(part.encode()) / len(part)) and part != LINES
    assert sequences(4, content="plain ascii " * 20).bytes_per_token == 1.0


@pytest.mark.parametrize("length", [1, 3, 8, 50, 137])
def test_every_token_of_an_epoch_is_predicted_once(length: int) -> None:
    """The targets of an epoch, put in order, are one stretch of the text, and each input is what stands before."""
    made = loader(batch=5, length=length)
    found = sequences(length).train_ids.tolist()
    for epoch in range(4):
        starts = made.draw(epoch).tolist()
        assert len(starts) == made.count and max(starts) + length < len(found)
        assert sorted(starts) == list(range(min(starts), min(starts) + made.count * length, length))
        x, y = (torch.cat(parts) for parts in zip(*made.train(epoch), strict=True))
        assert x.shape == y.shape == (made.count, length) and x.dtype == y.dtype == torch.int64
        for start, tokens, following in zip(starts, x.tolist(), y.tolist(), strict=True):
            assert tokens == found[start : start + length]
            assert following == found[start + 1 : start + 1 + length]
    left = len(found) - made.count * length
    assert 0 < left < 2 * length + 1  # the first token, which is no target, and fewer than two sequences


def test_an_epoch_depends_on_seed_and_epoch_alone() -> None:
    first, again, other = loader(), loader(), loader(seed=1)
    assert torch.equal(first.draw(3), again.draw(3))  # without the epochs before
    assert not torch.equal(first.draw(3), first.draw(4)) and not torch.equal(first.draw(3), other.draw(3))
    assert len({int(first.draw(epoch).min()) for epoch in range(30)}) > 4  # the boundaries move


def test_validation_is_the_other_part_in_order() -> None:
    made, found = loader(batch=3), sequences()
    x, y = (torch.cat(parts).flatten().tolist() for parts in zip(*made.test(), strict=True))
    whole = found.validation_ids.tolist()
    assert x == whole[: made.test_size * 8] and y == whole[1 : made.test_size * 8 + 1]
    assert 0 < len(whole) - len(y) <= 8


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_share_every_batch(world: int) -> None:
    whole = loader(batch=7)
    parts = [loader(7, 0, rank, world) for rank in range(world)]
    assert {part.steps for part in parts} == {whole.steps} == {-(-whole.count // 7)}
    for made, expected in (([p.train(1) for p in parts], whole.train(1)), ([p.test() for p in parts], whole.test())):
        for (x, y), *shares in zip(expected, *made, strict=True):
            for rank, (x_rank, y_rank) in enumerate(shares):
                assert torch.equal(x_rank, x[rank::world]) and torch.equal(y_rank, y[rank::world])


def test_a_text_of_one_sequence_and_one_token() -> None:
    made = loader(batch=4, length=8, content="abcdefghi" * 9)  # the last tenth has 9 characters
    assert made.test_size == 1
    short = sequences(8, content="x" * 10 + "yabcdefghi" * 8)
    assert short.train_size == 9
    alone = loader(batch=4, length=10, content="0123456789a" * 10)
    assert alone.test_size == 1 and alone.count == 8


def test_a_record_identifies_the_text() -> None:
    assert sequences(4, "bytes").record == {
        "file": "count.txt",
        "bytes": len(LINES.encode()),
        "sha256": hashlib.sha256(LINES.encode()).hexdigest(),
        "bytes_per_token": 1.0,
    }
    assert sequences(4).record["vocabulary"] == "".join(sorted(set(LINES)))


@pytest.mark.parametrize(
    ("content", "tokens", "length", "said"),
    [
        (b"", "bytes", 4, "count.txt must hold a text, it is empty"),
        (b"abc", "bytes", 4, "the first 90 % of count.txt must have more tokens than a sequence, 4, have 2"),
        (b"abc" * 10, "characters", 4, "the last 10 % of count.txt must have more tokens than a sequence, 4, have 3"),
        (b"abc\xff" * 20, "characters", 4, "must be UTF-8 for --tokens characters, byte 3 is not: --tokens bytes"),
        ("aé".encode()[:-1] * 20, "characters", 4, "byte 1 is not"),
    ],
)
def test_what_cannot_be_a_text(content: bytes, tokens: str, length: int, said: str) -> None:
    with pytest.raises(UserError) as error:
        text(content).sequences(tokens, length)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_too_many_characters_or_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dcil.data.text.MAX_VOCABULARY", 10)
    with pytest.raises(UserError, match=r"at most 10 different characters, has \d+: --tokens bytes has 256"):
        sequences()
    monkeypatch.setattr("dcil.data.text.MAX_BYTES", 100)
    with pytest.raises(UserError, match="at most 100 bytes, has"):
        text()


def test_a_large_vocabulary_keeps_its_numbers() -> None:
    many = "".join(chr(0x4E00 + i) for i in range(3000)) * 2
    found = sequences(4, content=many)
    assert found.classes == 3000 and found.ids[:3000].tolist() == list(range(3000))
    assert found.bytes_per_token == 3.0


# -- where texts come from ------------------------------------------------------------------------------------------


def test_text_is_the_file_itself(tmp_path: Path) -> None:
    file = tmp_path / "my text.txt"
    file.write_bytes(b"one\r\ntwo\n" * 20)
    loaded = data.load("text", file)
    assert isinstance(loaded, Text)
    assert (loaded.name, loaded.file, loaded.content) == ("text", "my text.txt", b"one\r\ntwo\n" * 20)
    prepared = data.prepare(loaded, "bytes", 4)
    assert isinstance(prepared, Sequences) and prepared.shape == (4,)


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, said in ((tmp_path, "is a folder"), (tmp_path / "a", "does not exist"), (tmp_path / "pipe", "no")):
        with pytest.raises(
            UserError, match=f"needs --data-dir FILE, the text itself, and .* {said}.*pydoc needs no file"
        ):
            data.load("text", path)
    secret = tmp_path / "secret"
    secret.write_bytes(b"x")
    secret.chmod(0)
    if os.access(secret, os.R_OK):
        pytest.skip("root reads everything")
    with pytest.raises(UserError, match="cannot be read: Permission denied"):
        data.load("text", secret)


def test_pydoc_needs_no_download(tmp_path: Path) -> None:
    loaded = data.load("pydoc", tmp_path, download=False)
    assert isinstance(loaded, Text) and len(loaded.content) > 200_000
    assert loaded.content == data.load("pydoc", tmp_path).content  # type: ignore[union-attr]
    assert 50 < loaded.sequences("characters", 256).classes < 256


def test_shakespeare_is_downloaded_once_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play, asked = b"First Citizen:\nBefore we proceed any further" * 10, list[tuple[str, str]]()
    monkeypatch.setattr(texts, "SHA256", hashlib.sha256(play).hexdigest())

    def fetch(url: str, known_hash: str, folder: Path) -> Path:
        asked.append((url, known_hash))
        (folder / "input.txt").write_bytes(play)
        return folder / "input.txt"

    for _ in range(2):
        assert texts.load_shakespeare(tmp_path / "data", fetch).content == play
    assert asked == [(texts.SHAKESPEARE, f"sha256:{hashlib.sha256(play).hexdigest()}")]
    assert [p.name for p in (tmp_path / "data" / "tinyshakespeare").iterdir()] == ["input.txt"]
    (tmp_path / "data" / "tinyshakespeare" / "input.txt").write_bytes(b"Second Citizen")
    with pytest.raises(UserError, match="must have the published content"):
        texts.load_shakespeare(tmp_path / "data", fetch)


def test_shakespeare_without_a_network(tmp_path: Path) -> None:
    def fetch(url: str, known_hash: str, folder: Path) -> Path:
        raise OSError("Network is unreachable")

    for how, said in ((None, "downloads are off"), (fetch, "could not be downloaded .Network is unreachable.: put")):
        with pytest.raises(UserError, match=said):
            texts.load_shakespeare(tmp_path / "data", how)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(UserError, match="the data directory must be a folder"):
        texts.load_shakespeare(file, None)
