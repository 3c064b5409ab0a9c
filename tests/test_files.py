"""Files that are either whole or not there: new directories appear at once, sealed JSON shows any change."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetdpt.core.errors import FileError
from hetdpt.store.atomic import new_directory, read_sealed_json, require_new, sha256, write_sealed_json

VALUES = {"format": 1, "plan": {"attention": [1, 10]}, "name": "ViT ±"}
ALTERED = "was altered or damaged since it was saved; save the model again"


def refused(text: str) -> Any:
    """Expect a ``FileError`` that says exactly ``text``."""
    return pytest.raises(FileError, match=f"^{re.escape(text)}$")


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def write(target: Path, overwrite: bool = False, text: str = "new") -> None:
    with new_directory(target, "a", overwrite) as scratch:
        (scratch / "a").write_text(text)
        assert not (target / "a").exists() or (target / "a").read_text() != text


def write_half(target: Path, failure: type[BaseException], overwrite: bool = False) -> None:
    with new_directory(target, "a", overwrite) as scratch:
        (scratch / "a").write_text("half")
        raise failure


def test_a_new_directory_appears_with_its_parents_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "runs" / "one"
    write(target)
    assert names(target) == ["a"]
    assert names(target.parent) == ["one"]
    assert names(tmp_path) == ["runs"]


def test_a_new_directory_has_the_rights_of_any_other(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    write(tmp_path / "new")
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt])
def test_a_failure_leaves_neither_target_nor_scratch(tmp_path: Path, failure: type[BaseException]) -> None:
    with pytest.raises(failure):
        write_half(tmp_path / "new", failure)
    assert names(tmp_path) == []


def test_a_failure_leaves_what_was_to_be_overwritten(tmp_path: Path) -> None:
    target = tmp_path / "old"
    write(target, text="old")
    with pytest.raises(RuntimeError):
        write_half(target, RuntimeError, overwrite=True)
    assert names(tmp_path) == ["old"]
    assert (target / "a").read_text() == "old"


def test_a_directory_that_is_not_ours_is_not_overwritten(tmp_path: Path) -> None:
    target = tmp_path / "photos"
    target.mkdir()
    (target / "cat.jpg").write_text("irreplaceable")
    with refused(f"{target} is not overwritten, because it has no a and so was not made by hetdpt; remove it yourself"):
        write(target, overwrite=True)
    assert (target / "cat.jpg").read_text() == "irreplaceable"


def test_where_the_new_one_cannot_be_put_the_old_one_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "old"
    write(target, text="old")
    move = os.replace
    calls: list[str] = []

    def fail_the_second_time(source: Path, destination: Path) -> None:
        calls.append(str(source))
        if len(calls) == 2:
            raise OSError("no space left on device")
        move(source, destination)

    monkeypatch.setattr(os, "replace", fail_the_second_time)
    with pytest.raises(OSError, match="no space"):
        write(target, overwrite=True)
    assert (target / "a").read_text() == "old"
    assert names(tmp_path) == ["old"]


def test_an_existing_directory_is_refused_and_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "old"
    write(target, text="old")
    with refused(f"{target} exists already; give another path, or allow overwriting"):
        write(target)
    assert names(tmp_path) == ["old"]
    assert (target / "a").read_text() == "old"


def test_an_existing_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with refused(f"{tmp_path / 'file'} exists already; give another path, or allow overwriting"):
        write(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_an_empty_directory_is_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    require_new(tmp_path / "empty")
    write(tmp_path / "empty")
    assert names(tmp_path / "empty") == ["a"]


def test_overwriting_replaces_everything(tmp_path: Path) -> None:
    target = tmp_path / "old"
    write(target, text="old")
    (target / "b").write_text("old")
    write(target, overwrite=True)
    assert names(tmp_path) == ["old"]
    assert names(target) == ["a"]
    assert (target / "a").read_text() == "new"


def test_a_place_below_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for target in (file / "new", file / "deep" / "new"):
        text = f"{target} cannot be written, because {file} is a file, not a directory; give another path"
        with refused(text):
            write(target)
        with refused(text):
            require_new(target, overwrite=True)


def test_a_place_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with refused(f"{tmp_path / 'link' / 'new'} cannot be written: File exists; give another path"):
        write(tmp_path / "link" / "new")


def test_sha256_is_that_of_the_bytes(tmp_path: Path) -> None:
    (tmp_path / "abc").write_bytes(b"abc")
    known = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-2, appendix B.1
    assert sha256(tmp_path / "abc") == known


# JSON knows no whole numbers as keys, and NaN equals nothing; time is not what is tested here.
leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
values = st.dictionaries(st.text().filter(lambda key: key != "checksum"), leaves | st.lists(leaves))


@settings(max_examples=50, deadline=None)
@given(written=values)
def test_sealed_json_comes_back(written: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("sealed") / "values.json"
    write_sealed_json(path, written)
    assert read_sealed_json(path) == written


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    path = tmp_path / "hetdpt.json"
    write_sealed_json(path, VALUES)
    return path


def test_layout_and_order_are_not_sealed(sealed: Path) -> None:
    shown = json.loads(sealed.read_text())
    sealed.write_text(json.dumps(dict(reversed(shown.items()))))
    assert read_sealed_json(sealed) == VALUES


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"plan": {"attention": [1, 11]}},
        {"more": 1},
        {"checksum": "0" * 64},
        {"checksum": None},
    ],
)
def test_altered_values_are_refused(sealed: Path, change: dict[str, Any]) -> None:
    sealed.write_text(json.dumps(json.loads(sealed.read_text()) | change))
    with refused(f"{sealed} {ALTERED}"):
        read_sealed_json(sealed)


@pytest.mark.parametrize("text", ["{}", "[]", "null", '"checksum"', '{"format": 1}'])
def test_what_was_never_sealed_is_refused(sealed: Path, text: str) -> None:
    sealed.write_text(text)
    with refused(f"{sealed} {ALTERED}"):
        read_sealed_json(sealed)


def test_a_truncated_file_is_refused_at_every_length(sealed: Path) -> None:
    whole = sealed.read_bytes().rstrip()
    for length in range(0, len(whole), 7):
        sealed.write_bytes(whole[:length])
        with pytest.raises(FileError, match=f"^{re.escape(str(sealed))} is damaged: it is not JSON "):
            read_sealed_json(sealed)


def test_a_binary_file_is_refused(sealed: Path) -> None:
    sealed.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FileError, match=r"is damaged: it is not JSON .*; save the model again"):
        read_sealed_json(sealed)


def test_a_missing_file_is_refused(tmp_path: Path, sealed: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path / "nowhere" / "none.json", sealed / "none.json"):
        with refused(f"{path} is missing; a directory written by hetdpt.save was expected"):
            read_sealed_json(path)
