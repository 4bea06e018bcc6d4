"""Compiled code on disk: made for the user alone, and read only if nobody else can have written it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from softdtw_cuda._cache_folder import read_cached, why_not_kept, write_cached

CONTENT = b"compiled code"

pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Windows has no owners and modes")


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that was written a moment ago, in a folder that did not exist."""
    folder = tmp_path / "some" / "cache"
    monkeypatch.setenv("SOFTDTW_CUDA_CACHE", str(folder))
    assert write_cached(folder / "kernel", CONTENT) is None
    assert read_cached(folder / "kernel") == CONTENT
    return folder / "kernel"


def test_folders_and_files_are_for_the_user_alone(stored: Path) -> None:
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (stored, stored.parent, stored.parent.parent)]
    assert modes == [0o600, 0o700, 0o700]


@pytest.mark.parametrize("mode", [0o020, 0o002])
@pytest.mark.parametrize("what", ["file", "folder"])
def test_what_others_may_write_is_not_read(stored: Path, what: str, mode: int) -> None:
    path = stored if what == "file" else stored.parent
    path.chmod(path.stat().st_mode | mode)
    assert read_cached(stored) is None
    if what == "folder":
        reason = write_cached(stored, CONTENT)
        assert reason is not None
        assert str(stored.parent) in reason
        assert why_not_kept() == reason
    else:
        assert write_cached(stored, CONTENT) is None
        assert read_cached(stored) == CONTENT, "a file of the user's own replaces it"


def test_what_belongs_to_another_user_is_not_read(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert read_cached(stored) is None
    assert write_cached(stored, CONTENT) is not None


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="gives a file away")
def test_a_file_given_to_another_user_is_not_read(stored: Path) -> None:
    os.chown(stored, 12345, -1)
    assert read_cached(stored) is None


def test_a_probe_says_whether_anything_can_be_kept(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_not_kept() is None
    assert list(stored.parent.iterdir()) == [stored], "it leaves nothing behind"

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    reason = why_not_kept()
    assert reason is not None
    assert "No space left" in reason
    assert list(stored.parent.iterdir()) == [stored]
