"""Explain a model to a reader: the mass and the words of its states, their similarity, the states of a text."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hmmlm.checks import padded
from hmmlm.errors import InputError
from hmmlm.hmm import HMM
from hmmlm.lm.embeddings import long_run
from hmmlm.lm.lm import LanguageModel
from hmmlm.ops.pieces import at_once


@dataclass(frozen=True)
class StateSummary:
    """The states of a model: transitions, stationary mass and most telling words."""

    transition: Tensor  # [Z, Z] float64, p(next state | state); restarts after <eos> are included
    mass: Tensor  # [Z] stationary distribution: the long-run share of tokens that each state emits
    words: Tensor  # [Z, K] token ids, the most telling first; padded with −1
    order: Tensor  # [Z] states in the order in which they are shown; by decreasing mass


@dataclass(frozen=True)
class TextExplanation:
    """The states of a text: the Viterbi path, the posterior and the likelihood."""

    tokens: list[int]  # [T]
    states: list[int]  # [T] Viterbi path
    posterior: Tensor  # [T, Z] p(state | text)
    log_prob: float  # natural log-likelihood of the text


@torch.no_grad()
def explain_states(lm: LanguageModel, words: int = 10) -> StateSummary:
    """Compute the stationary mass and the `words` most telling words of every state.

    Words are ranked by their contribution to the mutual information of state and word, p(w|z) log p(w|z)/p(w). This
    ranks down both frequent words that every state emits and rare words that only one state emits.

    Raises:
        InputError: if the model has too many states (`text.embeddings.MAX_STATES`).
    """
    hmm, transition, mass = long_run(lm.hmm, lm.tokenizer.eos_id if lm.restarts else None)
    log_word = (mass @ hmm.emission.dense().exp()).log()
    telling = telling_words(hmm, torch.arange(hmm.num_states), log_word, words)
    return StateSummary(transition, mass, telling, mass.argsort(descending=True))


@torch.no_grad()
def telling_words(hmm: HMM, states: Tensor, log_word: Tensor, count: int) -> Tensor:
    """Return the `count` most telling words of each of `states` [n]: token ids [n, K], padded with −1.

    Args:
        log_word: [V] log p(word) in the long run.
    """
    found = []
    for piece in states.split(at_once(hmm.vocab_size, 2**22)):
        words, log_probs = hmm.detach().emission.log_rows(piece)
        probs, contrast = log_probs.exp(), log_probs - log_word[words.clamp(min=0)]
        contribution = torch.where(probs > 0, probs * contrast, 0.0)
        top = contribution.topk(min(count, words.shape[1]), dim=1)
        # Contributions below 1/200 of the largest are noise.
        telling = words.gather(1, top.indices).masked_fill(top.values < top.values[:, :1] / 200, -1)
        telling[:, 0] = words.gather(1, top.indices[:, :1])[:, 0]
        found.append(telling)
    return torch.cat(found)


@torch.no_grad()
def explain_text(lm: LanguageModel, text: str) -> TextExplanation:
    """Compute Viterbi states and posteriors of a text, split into sequences as `lm.perplexity` splits it.

    Raises:
        InputError: if the text has no words, or has probability zero.
    """
    tokens = lm.encode(text)
    if set(tokens) == {lm.tokenizer.eos_id}:
        raise InputError("a text to explain needs at least one word")
    sequences = lm.sequences(tokens)
    batch = padded(sequences)
    paths, posteriors = lm.hmm.viterbi(*batch)[0].tolist(), lm.hmm.posterior(*batch).cpu()
    states = [state for path, sequence in zip(paths, sequences, strict=True) for state in path[: len(sequence)]]
    posterior = torch.cat([p[: len(sequence)] for p, sequence in zip(posteriors, sequences, strict=True)])
    return TextExplanation(tokens, states, posterior, float(lm.hmm.log_likelihood(*batch).double().sum()))


def similar_order(summary: StateSummary, chosen: Tensor) -> Tensor:
    """Reorder the states `chosen` [N] so that states with similar predecessors and successors are adjacent.

    Spectral seriation: sorts by the Fiedler vector of the graph of cosine similarities.
    """
    if len(chosen) < 3:
        return chosen
    flow = summary.mass[:, None] * summary.transition
    after = summary.transition[chosen]
    before = (flow / flow.sum(0, keepdim=True).clamp_min(1e-300)).T[chosen]
    profile = torch.cat([after.sqrt(), before.sqrt()], dim=1)  # √p: the cosine is then the Bhattacharyya coefficient
    similarity = profile @ profile.T
    scale = similarity.sum(1).rsqrt()
    _, vectors = torch.linalg.eigh(scale[:, None] * similarity * scale)
    return chosen[(vectors[:, -2] * scale).argsort()]
