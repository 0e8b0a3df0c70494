"""An untrusted file is a regular one of an allowed size, or it is refused without waiting for it."""

import os
import stat
from pathlib import Path

import pytest

from llama.untrusted.files import open_regular, read_regular


def test_a_file_and_a_link_to_one_are_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("a")
    for name in ("a", "link"):
        with open_regular(tmp_path / name) as file:
            assert file.read() == b"abc"
        assert read_regular(tmp_path / name, limit=3) == b"abc"
        with pytest.raises(ValueError, match="longer than 2 bytes"):
            read_regular(tmp_path / name, limit=2)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_name_that_leads_to_a_pipe_by_the_time_it_is_opened_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    regular = os.stat(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", lambda path: regular)  # as it was a moment before
        with pytest.raises(ValueError, match="it is a named pipe"):
            open_regular(tmp_path / "pipe")
    assert stat.S_ISFIFO(os.stat(tmp_path / "pipe").st_mode)


@pytest.mark.skipif(not Path("/proc/version").is_file(), reason="needs /proc")
def test_a_file_longer_than_its_stated_size_is_limited() -> None:
    assert Path("/proc/version").stat().st_size == 0
    assert read_regular(Path("/proc/version"), limit=1 << 16)
    with pytest.raises(ValueError, match="longer than 4 bytes"):
        read_regular(Path("/proc/version"), limit=4)
