"""What the states of a model mean to a reader: their words, their mass, who is like whom, the path of a sentence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hmmlm.errors import InputError
from hmmlm.hmm import BlockedHMM
from hmmlm.lm import LanguageModel, padded

LARGEST = 8_192  # states: the matrices are made dense, in float64


@dataclass(frozen=True)
class States:
    """What is known of all states of a model."""

    transition: Tensor  # [Z,Z] float64, probability of the next token's state, restarts after <eos> included
    mass: Tensor  # [Z] stationary: each state's share of the tokens in the long run, where the model writes the text
    words: Tensor  # [Z,K] token ids, the most telling first; −1 after the last that tells anything
    order: Tensor  # [Z] states, those of the largest mass first


@dataclass(frozen=True)
class Path:
    """A text as the model reads it."""

    tokens: list[int]  # [T]
    states: list[int]  # [T] Viterbi
    posterior: Tensor  # [T,Z] p(state | text)
    log_prob: float  # of the text, natural log


@torch.no_grad()
def explain_states(lm: LanguageModel, words: int = 10) -> States:
    """Stationary mass and the most telling words of every state.

    A word tells of a state by its share of what the state says about the next word, p(w|z) · log p(w|z) / p(w): the sum
    over words, weighted by the mass of the states, is the mutual information of state and word. So neither frequent
    words that every state emits nor rare words that only this one knows come first."""
    if lm.hmm.states > LARGEST:
        raise InputError(f"{lm.hmm.states:,} states are too many to explain side by side: at most {LARGEST:,}")
    hmm = (lm.hmm.dense() if isinstance(lm.hmm, BlockedHMM) else lm.hmm).to("cpu", torch.float64)
    start, transition, emission = (log_probs.exp() for log_probs in hmm.parameters)
    if lm.restarts:  # what follows <eos> is the start, whatever the transition matrix says
        ends = emission[:, lm.tokenizer.eos_id, None]
        transition = ends * start + (1 - ends) * transition
    mass = stationary(start, transition)
    log_word = (mass @ emission).log()
    contribution = torch.where(emission > 0, emission * (hmm.log_emission - log_word), torch.zeros_like(emission))
    top = contribution.topk(min(words, emission.shape[1]), dim=1)
    # Beside a word that says nearly all, those that say less than a two-hundredth of it are chance.
    told = top.indices.masked_fill(top.values < top.values[:, :1] / 200, -1)
    told[:, 0] = top.indices[:, 0]
    return States(transition, mass, told, mass.argsort(descending=True))


def stationary(start: Tensor, transition: Tensor) -> Tensor:
    """The distribution over states that the transition matrix leaves as it is, [Z] float64.

    x ← x · ε (1 − (1 − ε) A)⁻¹ is where a walk from x is after a random number of steps, 1/ε in the mean: no period
    matters, and where A leaves several distributions as they are, the one that start leads to is found. A few such
    leaps of a million steps are enough, unless a chain takes 10⁸ steps and more to forget where it began: then this is
    its distribution after about so many."""
    start, transition = start.double(), transition.double()
    transition = transition / transition.sum(1, keepdim=True)  # an excess of 10⁻⁷ a step would not vanish
    leap = torch.linalg.lu_factor(torch.eye(len(start), dtype=start.dtype) - (1 - 1e-6) * transition.T)
    mass = start / start.sum()
    for _ in range(100):
        following = torch.linalg.lu_solve(*leap, mass[:, None])[:, 0].clamp_min(0)
        following = following / following.sum()
        done = bool((following - mass).abs().sum() < 1e-9)
        mass = following
        if done:
            break
    return mass


@torch.no_grad()
def explain_text(lm: LanguageModel, text: str) -> Path:
    """Viterbi states and posteriors of a text, every `<eos>` included; read as `lm.perplexity` reads it."""
    tokens = lm.encode(text)
    if set(tokens) == {lm.tokenizer.eos_id}:
        raise InputError("a text to explain needs at least one word")
    sequences = lm.sequences(tokens)
    batch = padded(sequences)
    paths, posteriors = lm.hmm.viterbi(*batch)[0].tolist(), lm.hmm.posterior(*batch).cpu()
    states = [state for path, sequence in zip(paths, sequences, strict=True) for state in path[: len(sequence)]]
    posterior = torch.cat([p[: len(sequence)] for p, sequence in zip(posteriors, sequences, strict=True)])
    return Path(tokens, states, posterior, float(lm.hmm.log_likelihood(*batch).double().sum()))


def similar_order(states: States, chosen: Tensor) -> Tensor:
    """The chosen states, so arranged that those with alike neighbours (before and after) stand side by side.

    The order along the Fiedler vector of the graph of cosine similarities, the classic spectral seriation."""
    if len(chosen) < 3:
        return chosen
    flow = states.mass[:, None] * states.transition
    after = states.transition[chosen]
    before = (flow / flow.sum(0, keepdim=True).clamp_min(1e-300)).T[chosen]
    profile = torch.cat([after.sqrt(), before.sqrt()], dim=1)  # √p: the cosine is then the Bhattacharyya affinity
    similarity = profile @ profile.T
    scale = similarity.sum(1).rsqrt()
    _, vectors = torch.linalg.eigh(scale[:, None] * similarity * scale)
    return chosen[(vectors[:, -2] * scale).argsort()]
