"""Files appear whole or not at all, and nothing but a regular file is ever replaced."""

from __future__ import annotations

import os

import pytest

from engine.core import InputError
from engine.steplog.atomic import AtomicTextFile, write_text


def put_folder(path):
    path.mkdir()


def put_link(path):
    target = path.with_name("target")
    target.write_text("precious")
    path.symlink_to(target)


def put_dead_link(path):
    path.symlink_to(path.with_name("nowhere"))


def put_pipe(path):
    os.mkfifo(path)


PLACES = {
    "folder": (put_folder, "is a folder"),
    "link": (put_link, "is a symbolic link"),
    "dead link": (put_dead_link, "is a symbolic link"),
    "pipe": (put_pipe, "not a regular file"),
}


@pytest.mark.parametrize("place", PLACES)
def test_what_is_no_regular_file_is_refused_and_stays(tmp_path, place):
    put, message = PLACES[place]
    path = tmp_path / "out.json"
    put(path)
    before = sorted(tmp_path.iterdir()), path.lstat().st_ino
    with pytest.raises(InputError, match=message):
        write_text(path, "new")
    assert (sorted(tmp_path.iterdir()), path.lstat().st_ino) == before
    if place == "link":
        assert path.read_text() == "precious"


@pytest.mark.parametrize("place", PLACES)
def test_what_takes_the_name_while_the_file_is_written_stays_too(tmp_path, place):
    put, message = PLACES[place]
    path = tmp_path / "out.json"
    file = AtomicTextFile(path)
    file.write_line("new")
    put(path)
    with pytest.raises(InputError, match=message):
        file.commit()
    assert not list(tmp_path.glob(".lockstep*"))


def test_a_missing_folder_and_a_full_disk_are_one_line(tmp_path):
    with pytest.raises(InputError, match="cannot be written"):
        write_text(tmp_path / "none" / "out.json", "x")
    with pytest.raises(InputError, match="cannot be written"):
        write_text(tmp_path / ("x" * 300), "x")


def test_an_error_on_the_way_leaves_the_old_file(tmp_path):
    path = tmp_path / "out.json"
    write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "\ud800")
    assert path.read_text() == "old"
    assert [found.name for found in tmp_path.iterdir()] == ["out.json"]


def test_two_files_of_one_name_at_once_do_not_mix(tmp_path):
    path = tmp_path / "out.jsonl"
    first, second = AtomicTextFile(path), AtomicTextFile(path)
    first.write_line("first")
    second.write_line("second")
    second.commit()
    first.commit()
    assert path.read_text() == "first\n"
