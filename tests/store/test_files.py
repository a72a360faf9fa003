"""A checkpoint's files: numpy reads them, their digests are as documented, and block boundaries do not show."""

import itertools
import os
from pathlib import Path

import numpy as np
import pytest
import xxhash

from conduit.errors import CheckpointError
from conduit.store.checkpoint.direct_io import BLOCK, HEADER, write_all
from conduit.store.checkpoint.files import FileReader, FileSet, as_bytes


def written(folder, name, chunks, dtype, shape):
    with FileSet(folder) as files:
        file = files.create(name)
        for chunk in chunks:
            (file.append_rows if chunk.ndim == 2 else file.append)(chunk)
        file.describe(np.dtype(dtype), shape)
        files.finish()
        return files.entries


@pytest.mark.parametrize("size", [0, 1, HEADER, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + HEADER + 5])
def test_a_file_of_any_size_is_read_by_numpy_and_has_the_documented_digest(tmp_path, size):
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    cuts = [0, size // 3, size // 2, size]
    entries = written(tmp_path, "a/b.npy", [data[i:j] for i, j in itertools.pairwise(cuts)], np.uint8, (size,))
    path = tmp_path / "a" / "b.npy"
    np.testing.assert_array_equal(np.load(path), data)
    raw = path.read_bytes()
    assert entries["a/b.npy"].size == len(raw) == HEADER + size
    assert entries["a/b.npy"].digest == xxhash.xxh3_128_hexdigest(raw[HEADER:] + raw[:HEADER])
    told = []
    with FileReader(tmp_path, entries, lambda *seen: told.append(seen)) as reader:
        np.testing.assert_array_equal(reader.read("a/b.npy", np.dtype(np.uint8), (size,)), data)
        with pytest.raises(CheckpointError, match="what its table needs"):
            reader.read("a/b.npy", np.dtype(np.uint8), (size + 1,))
        with pytest.raises(CheckpointError, match="is not listed"):
            reader.read("a/c.npy", np.dtype(np.uint8), (size,))
    assert told[-1] == (HEADER + size, HEADER + size)


def test_rows_that_lie_apart_are_close_together_in_the_file(tmp_path):
    rows, row_bytes, stride = 2 * BLOCK // 7056 + 7, 7056, 7168
    memory = np.random.default_rng(0).integers(0, 256, (rows, stride), np.uint8)
    apart = memory[:, :row_bytes]
    chunks = [as_bytes(np.arange(5, dtype=np.uint8)), apart[:100], apart[100:101], apart[101:101], apart[101:]]
    size = 5 + rows * row_bytes
    written(tmp_path, "rows.npy", chunks, np.uint8, (size,))
    found = np.load(tmp_path / "rows.npy", mmap_mode="r")
    assert found[:5].tolist() == [0, 1, 2, 3, 4]
    np.testing.assert_array_equal(found[5:].reshape(rows, row_bytes), apart)


def test_a_place_that_cannot_be_written_past_the_cache_is_written_through_it(tmp_path):
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    try:
        write_all(fd, b"x" * 1000, 3)
    finally:
        os.close(fd)
    assert (tmp_path / "file").read_bytes() == b"\0\0\0" + b"x" * 1000


def append_blocks(file, count):
    for _ in range(count):
        file.append(np.zeros(BLOCK, np.uint8))


def descriptors():
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_a_file_that_cannot_be_written_fails_the_set_and_leaves_no_descriptor(tmp_path):
    before = descriptors()
    with FileSet(tmp_path) as files:
        file = files.create("a.npy")
        os.close(file.fd)
        file.fd = os.open("/dev/null", os.O_RDONLY)
        with pytest.raises(OSError, match="Bad file descriptor"):
            append_blocks(file, 20)
    assert descriptors() == before
