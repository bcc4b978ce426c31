"""Missing words of a sequence that are known to be words of some kind: not `<eos>`, say."""

import torch
from torch import Tensor

from hmmlm.errors import InputError
from hmmlm.hmm.blocked import BlockedHMM
from hmmlm.hmm.dense import HMM
from hmmlm.hmm.trellis import Factors, Trellis
from hmmlm.ops.scan.naive import NEG_INF, logsumexp


@torch.no_grad()
def infill_words(hmm: HMM | BlockedHMM, tokens: list[int], never: int) -> Tensor:
    """log p(blank = v | all that is observed, no blank is `never`) [blanks, V], a blank being a −1 of tokens [T].

    `hmm.infill` sums over every token at the other blanks. Here a state explains a blank by the probability that it
    emits anything but `never`.
    """
    hmm = hmm.detach()
    blanks = [t for t, token in enumerate(tokens) if token < 0]
    log_probs = _blocked(hmm, tokens, never) if isinstance(hmm, BlockedHMM) else _dense(hmm, tokens, never)
    log_probs = log_probs[blanks]
    log_probs[:, never] = NEG_INF
    return log_probs.log_softmax(1)


def _dense(hmm: HMM, tokens: list[int], never: int) -> Tensor:
    """[T, V]; the blank is one word more, and states emit it beside the others, so that they sum to more than one."""
    others = hmm.log_emission.index_fill(1, torch.tensor(never, device=hmm.device), NEG_INF)
    emission = torch.cat([hmm.log_emission, logsumexp(others, 1)[:, None]], 1)
    extended = HMM(hmm.log_start, hmm.log_transition, emission, hmm.impl)
    observed = [[hmm.vocab_size if token < 0 else token for token in tokens]]
    _require_possible(extended.log_likelihood(observed))
    return extended.infill(observed)[0, :, :-1]


def _blocked(hmm: BlockedHMM, tokens: list[int], never: int) -> Tensor:
    """[T, V]; a block emits blanks surely, that of `never` by what is left of it."""
    factors = hmm.factors
    others = factors.block_of_word == factors.block_of_word[never]
    others[never] = False
    log_blank = torch.zeros_like(factors.log_start)
    log_blank[factors.span(never)] = logsumexp(factors.log_emission[others], 0)
    trellis = _Blanks(factors, tokens, log_blank)
    _require_possible(trellis.log_likelihood())
    return torch.stack([factors.emit(around) for around in trellis.surroundings()])


class _Blanks(Trellis):
    """`log_blank` [Z] is how each state explains a missing token."""

    def __init__(self, factors: Factors, tokens: list[int], log_blank: Tensor) -> None:
        self.log_blank = log_blank
        super().__init__(factors, tokens)

    def scores(self, t: int) -> Tensor:
        return self.log_blank if self.tokens[t] < 0 else super().scores(t)


def _require_possible(log_likelihood: Tensor) -> None:
    if not bool(log_likelihood.isfinite()):
        raise InputError("the model gives this text probability zero, whatever stands in its blanks")
