"""Memory-mapped arrays larger than memory."""

import mmap

import numpy as np


def release_pages(array: np.ndarray) -> None:
    """Give back the pages of a memory-mapped array that were read, which are read again where they are needed.

    The system would do so if memory were short. Until then they count as memory of the process, and nobody can see how
    much it needs.
    """
    base = array.base
    while isinstance(base, np.ndarray):  # of a part of an array
        base = base.base
    if isinstance(base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        base.madvise(mmap.MADV_DONTNEED)
