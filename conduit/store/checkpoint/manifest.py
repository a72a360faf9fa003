"""A checkpoint's format, and the folder it lies in (docs/checkpoints.md).

    path/0000000007/manifest.json                  the contents, and a digest of every file
                    tables/replay/...              words, rows and values of a table (conduit.store.checkpoint.save)
                    policies/policy/...            the arrays of a weights slot
                    extra/...                      the caller's own bytes

A checkpoint is written into a folder whose name begins with a dot, its manifest last. The folder is renamed to a number when all of it
is on the disk. So a numbered folder is always complete, even if its process was killed. A folder with a dot is left over from a killed
process, and the next checkpoint removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Generator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from conduit.errors import Busy, CheckpointError, ConfigError
from conduit.field import Field
from conduit.forking import LockFile
from conduit.numbers import at_least
from conduit.store.checkpoint.direct_io import unreadable
from conduit.store.checkpoint.files import DAMAGED, FileEntry
from conduit.store.format.columns import Column
from conduit.store.format.filenames import safe
from conduit.store.format.layout import SegmentSpec, TensorSpec

FORMAT = "conduit-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"

_NUMBER = re.compile(r"\d{10}")
_LEFTOVER = re.compile(r"\.\d{10}\.(tmp|old)-.*")


class TableEntry(msgspec.Struct, frozen=True):
    """A table as the manifest lists it.

    Attributes:
        folder: Folder of its files, below the checkpoint's folder.
        rows: Rows in the column files, halo copies and kept final observations included.
        items: {ragged field: items in its file of values}.
        inserted, sampled, deleted: A limiter's counts at the moment of the checkpoint.
        visible: Rows of all pages at that moment, halo copies not counted.
        pages_left_out, rows_left_out: Pages that were reused before they could be copied, and their rows.
    """

    folder: str
    rows: int
    items: dict[str, int]
    inserted: int
    sampled: int
    deleted: int
    visible: int
    pages_left_out: int
    rows_left_out: int


class PolicyEntry(msgspec.Struct, frozen=True):
    """A weights slot as the manifest lists it; version 0 has no files."""

    folder: str
    version: int


class LoaderEntry(msgspec.Struct, frozen=True):
    """A named loader: its table, its seed (64 bits, signed), the number of its next batch, and the digest of its epoch's rows."""

    table: str
    seed: int
    batch: int
    stock: int = 0


class Manifest(msgspec.Struct, frozen=True):
    """The contents of a checkpoint.

    Attributes:
        conduit: Version of Conduit that made it.
        engine: Name of the engine.
        created_ns: When it was made, nanoseconds since the epoch.
        spec: The specification that the engine was created with.
        tables, policies, loaders: Entries by name.
        extra: Names of the caller's own bytes.
        files: {name below the checkpoint's folder: entry}.
    """

    conduit: str
    engine: str
    created_ns: int
    spec: SegmentSpec
    tables: dict[str, TableEntry]
    policies: dict[str, PolicyEntry]
    loaders: dict[str, LoaderEntry]
    extra: tuple[str, ...]
    files: dict[str, FileEntry]


class _Envelope(msgspec.Struct, frozen=True):
    format: str
    version: int
    digest: str
    manifest: msgspec.Raw


def column_file(column: Column) -> str:
    """Name of a column's file, below its table's folder."""
    return f"columns/{safe(column.name)}.npy" if column.is_field else f"{column.name}.npy"


def policy_file(folder: str, tensor: TensorSpec) -> tuple[str, np.dtype[Any]]:
    """Name and dtype of the file of one array of a weights slot."""
    return f"{folder}/{safe(tensor.name)}.npy", np.dtype(Field("weights", tensor.dtype).numpy_dtype)


def extra_file(name: str) -> str:
    """Name of the file for the caller's own bytes of this name."""
    return f"extra/{safe(name)}.npy"


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write manifest.json into a checkpoint's folder, and sync it to the disk."""
    body = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    digest = xxhash.xxh3_128_hexdigest(body)
    with (path / MANIFEST).open("xb") as file:
        file.write(msgspec.json.encode(_Envelope(FORMAT, VERSION, digest, msgspec.Raw(body))) + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint in the folder `path`.

    Raises:
        CheckpointError: The manifest is missing, damaged, not Conduit's, or of another version.
    """
    file = path / MANIFEST
    try:
        data = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"Expected a checkpoint in {path}, found no file {file}: name another folder") from error
    except OSError as error:
        raise unreadable(error, file) from error
    try:
        head = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"Expected {file} to be readable, got {error}: {DAMAGED}") from error
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise CheckpointError(f"Expected {file} to say format {FORMAT!r}: it is no checkpoint of Conduit's")
    if head.get("version") != VERSION:
        raise CheckpointError(
            f"Expected format version {VERSION} in {file}, got {head.get('version')!r}: restore it with the version of "
            "Conduit that made it"
        )
    try:
        envelope = msgspec.json.decode(data, type=_Envelope)
        if xxhash.xxh3_128_hexdigest(bytes(envelope.manifest)) != envelope.digest:
            raise CheckpointError(f"Expected the digest {envelope.digest} of the manifest in {file}: {DAMAGED}")
        return msgspec.json.decode(envelope.manifest, type=Manifest)
    except (msgspec.MsgspecError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"Expected {file} to be readable, got {error}: {DAMAGED}") from error


def numbered(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first.

    Raises:
        CheckpointError: The folder cannot be read.
    """
    try:
        if not folder.is_dir():
            return []
        return sorted(one for one in folder.iterdir() if _NUMBER.fullmatch(one.name))
    except OSError as error:
        raise unreadable(error, folder) from error


def is_checkpoint(path: Path) -> bool:
    """Whether there is a manifest in this folder.

    Raises:
        CheckpointError: The folder cannot be read.
    """
    try:
        return (path / MANIFEST).exists()
    except OSError as error:
        raise unreadable(error, path) from error


def as_path(path: object) -> Path:
    """The caller's argument as a Path.

    Raises:
        ConfigError: It is not a path.
    """
    if not isinstance(path, str | os.PathLike) or not isinstance(found := os.fspath(path), str):
        raise ConfigError(f"Expected a path, got {path!r}")
    return Path(found)


def candidates(path: Path) -> list[Path]:
    """The checkpoints at `path`, best first: the path itself, or all checkpoints in that folder.

    Raises:
        CheckpointError: There is no checkpoint.
    """
    if is_checkpoint(path) or _NUMBER.fullmatch(path.name):
        return [path]
    found = numbered(path)
    if not found:
        raise CheckpointError(f"Expected a checkpoint, or a folder of checkpoints, at {path}, found none")
    return found[::-1]


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _alone(folder: Path) -> Generator[None]:
    """Keep other processes and threads from making checkpoints in a folder during the block.

    Raises:
        Busy: Another process or thread is making one.
    """
    lock = LockFile(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(lock.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Busy(
                f"Expected to be the only process that makes a checkpoint in {folder}, but another process is: wait for it, or "
                "name another folder"
            ) from error
        yield
    finally:
        lock.close()


def _make_folder(folder: Path) -> None:
    """Make a folder and its missing parents, and sync their names to the disk."""
    made = [folder]
    while not made[-1].parent.exists():
        made.append(made[-1].parent)
    folder.mkdir(parents=True, exist_ok=True)
    for one in reversed(made):
        # even if the folder existed: its creator may have been killed before the sync
        with contextlib.suppress(PermissionError):
            _sync_folder(one.parent)


@contextlib.contextmanager
def new_checkpoint(folder: Path, keep: int) -> Generator[tuple[Path, Path]]:
    """Make the next checkpoint in a folder. It appears when the block ends without an exception; older ones beyond `keep` are removed.

    Yields:
        The temporary folder to fill, and the path of the finished checkpoint.

    Raises:
        ConfigError: `keep` is below 1, or the folder is a file.
        Busy: Another process or thread is making a checkpoint there.
        OSError: The file system refuses.
    """
    keep = at_least("a number of checkpoints to keep", keep, 1)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"Expected a folder for checkpoints, got the file {folder}")
    _make_folder(folder)
    with _alone(folder):
        for one in folder.iterdir():
            if _LEFTOVER.fullmatch(one.name):  # no other process makes a checkpoint here now, so its maker is dead
                shutil.rmtree(one)
        last = numbered(folder)
        number = f"{int(last[-1].name) + 1 if last else 1:010d}"
        making = folder / f".{number}.tmp-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        making.mkdir()
        try:
            yield making, folder / number
            for below, _, _ in os.walk(making, topdown=False):
                _sync_folder(Path(below))
            making.rename(folder / number)
        except BaseException:
            shutil.rmtree(making, ignore_errors=True)
            raise
        _sync_folder(folder)
        for one in numbered(folder)[:-keep]:
            going = folder / f".{one.name}.old-{os.getpid()}"
            one.rename(going)  # a half-removed folder must not look like a complete checkpoint
            shutil.rmtree(going)
