"""The fuzz of tests/test_fuzz.py on a GPU: likelihoods there come from the Triton kernels wherever these apply."""

import pytest
import torch
from helpers.fuzz import Fuzz, UnionFuzz, campaign


@pytest.mark.parametrize("kind", [Fuzz, UnionFuzz])
def test_answers_on_a_gpu_agree_with_enumeration(kind: type[Fuzz], device: torch.device) -> None:
    right, wrong = campaign(range(200), device.type, kind)
    assert not wrong, "\n".join(wrong)
    assert right.total() > 10_000


def test_answers_in_parallel_chunks_on_a_gpu_agree_with_enumeration(device: torch.device) -> None:
    right, wrong = campaign(range(60), device.type, impl="parallel")
    assert not wrong, "\n".join(wrong)
    assert right.total() > 2500
