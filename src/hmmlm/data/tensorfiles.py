"""Files of tensors in the safetensors format."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from itertools import chain
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hmmlm.errors import InputError

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The names of dtypes in the format."""
CHECKSUM = "checksum"
"""The entry of a file's metadata."""
PIECE = 1 << 24
"""Bytes of a file that are read at once."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> str:
    """Write a safetensors file whose bytes depend on its content alone, one tensor at a time, readable as umask allows.

    Return the `file_checksum` of what was meant to be written.

    safetensors' own writer orders metadata at random and lets only the owner read.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # so that each is aligned
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(sorted(metadata.items()))}
    end = 0
    for name in names:
        tensor, begin = tensors[name], end
        end += tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = memoryview(len(text).to_bytes(8, "little") + text)
    crc = 0
    with path.open("wb") as file:
        for piece in chain([start], (_bytes(tensors[name]) for name in names)):
            file.write(piece)
            crc = zlib.crc32(piece, crc)
    return f"crc32:{crc:08x}"


def file_checksum(path: Path) -> str:
    """Return the checksum of a file's bytes, from the disk where the system allows it: not from its cache."""
    crc = 0
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while piece := file.read(PIECE):
            crc = zlib.crc32(piece, crc)
    return f"crc32:{crc:08x}"


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """Return a checksum of the names and bytes of tensors, for the metadata of their file."""
    crc = 0
    for name in sorted(tensors):
        crc = zlib.crc32(_bytes(tensors[name]), zlib.crc32(name.encode(), crc))
    return f"crc32:{crc:08x}"


def check_checksum(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raise an InputError if tensors of the file `path` are not those of its checksum; other programs write none."""
    with safe_open(path, framework="pt") as file:
        saved = (file.metadata() or {}).get(CHECKSUM)
    if saved is not None and saved != checksum(tensors):
        raise InputError(
            f"{path} is damaged: its tensors do not have the checksum that was saved with them ({saved:.40}): restore "
            f"the file, or remove {CHECKSUM} from its metadata if they were changed on purpose"
        )


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read all tensors and the metadata of a safetensors file."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise InputError(f"{path} is missing, truncated or not safetensors ({reason}): save it again") from None
