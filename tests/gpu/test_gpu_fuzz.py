"""The fuzz of tests/test_fuzz.py on a GPU: likelihoods there come from the Triton kernels wherever these apply."""

import torch
from helpers.fuzz import campaign


def test_answers_on_a_gpu_agree_with_enumeration(device: torch.device) -> None:
    right, wrong = campaign(range(200), device.type)
    assert not wrong, "\n".join(wrong)
    assert right.total() > 10_000
