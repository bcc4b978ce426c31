"""Import what training needs, and load the compiled loops from their cache: processes that are forked then need not.

Nothing here computes gradients: autograd may not be used before a fork.
"""

import lightning_fabric  # noqa: F401
import pytest  # noqa: F401
import torch
import torch.utils.tensorboard

import hmmlm.training.train  # noqa: F401
from hmmlm.ops.common import installed
from hmmlm.ops.scan import Evidence, Parameters

torch.set_num_threads(1)  # threads of OpenMP do not survive a fork: a child that used them would wait forever

if installed("numba"):
    from hmmlm.ops.scan import compiled

    for dtype in (torch.float32, torch.float64):
        uniform = Parameters(*(torch.zeros(size, dtype=dtype).log_softmax(-1) for size in ((4,), (4, 4), (4, 6))))
        for lengths in (None, torch.tensor([3, 2])):
            chain = compiled.make_chain(uniform, Evidence(torch.zeros(2, 3, dtype=torch.long), lengths), dtype)
            compiled.accumulate(chain, compiled.forward(chain), torch.ones(2, dtype=dtype), torch.Size((4, 6)))
