"""Sequential Monte Carlo: samples of another model under a constraint, weighted by how wrong the HMM was.

Steering draws token t from p_model(x_t | …) ψ_t / N_t, with ψ_t the HMM's probability that the constraint will be
satisfied and N_t the sum over tokens. Texts are then weighted by Π N_t / ψ_t−1, which makes them samples of the model
given the constraint as their number grows; resampling follows the promising ones.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hmmlm.arguments import check_arguments, describe
from hmmlm.checks import check_count, check_number, check_seed
from hmmlm.constrain.guide import Guide, Position
from hmmlm.constrain.steering import Steering
from hmmlm.errors import InputError
from hmmlm.ops.common import NEG_INF

_LARGEST = 1_000_000  # number of particles


class Particles(NamedTuple):
    """Weighted texts."""

    tokens: Tensor  # [P, T] the new tokens; after the end of a text, its last token is repeated
    log_weights: Tensor  # [P] normalized
    log_evidence: float
    """Estimate of the model's log-probability that the constraint is satisfied."""

    @check_arguments
    def draw(self, seed: int | None = None) -> list[int]:
        """Return the tokens of one text, drawn by its weight."""
        check_seed(seed)
        generator = torch.Generator()
        generator.seed() if seed is None else generator.manual_seed(seed)
        chosen = int(torch.multinomial(self.log_weights.exp().cpu(), 1, generator=generator))
        row: list[int] = self.tokens[chosen].tolist()
        return row


@torch.no_grad()
@check_arguments
def sample_particles(
    model: Any,
    input_ids: Tensor,
    guide: Guide,
    position: Position,
    num_particles: int = 16,
    seed: int | None = None,
    resample_below: float = 0.5,
) -> Particles:
    """Sample texts of a causal model of transformers given a constraint, with `num_particles` particles.

    A text is over with the end token of the guide, the only one before the constraint is satisfied. A text whose guide
    has none (require_eos=False) goes on, up to an end token of the model or the length of the guide.

    Args:
        input_ids: [1, T] the prompt.
        guide: of `lm.guide` for the same prompt.
        position: of `lm.guide`, after the prompt.
        resample_below: particles are resampled when their effective number is below this share of `num_particles`.
    """
    check_count("num_particles", num_particles, 1, _LARGEST)
    check_seed(seed)
    check_number("resample_below", resample_below)
    if not callable(model) or isinstance(model, type):
        raise InputError(f"model must be a causal model of transformers, not {describe(model)}")
    if input_ids.dtype not in (torch.int32, torch.int64):
        raise InputError(f"input_ids must be integers, not {str(input_ids.dtype).removeprefix('torch.')}")
    if input_ids.dim() != 2 or len(input_ids) != 1 or not input_ids.numel():
        raise InputError(f"input_ids must have shape [1, tokens], one prompt, not {list(input_ids.shape)}")
    if position.prompt and tuple(input_ids[0, -len(position.prompt) :].tolist()) != position.prompt:
        raise InputError("input_ids does not end with the tokens of the prompt of the guide: make a guide for this one")
    device, automaton, steering = input_ids.device, guide.automaton, Steering(guide, position)
    words, settled, accepting = automaton.vocab_size, automaton.settled().tolist(), automaton.accepting.tolist()
    generator = torch.Generator(device=device)
    generator.seed() if seed is None else generator.manual_seed(seed)
    ends = end_tokens(model)
    others = [] if guide.end is None else [end for end in ends if end != guide.end and end < words]
    ends |= set() if guide.end is None else {guide.end}
    states, going, cache = [position.automaton] * num_particles, [True] * num_particles, None
    texts = given = input_ids.expand(num_particles, -1)
    log_weights = torch.zeros(num_particles, dtype=torch.float64, device=device)
    log_ahead = torch.full_like(log_weights, guide.log_prob_accept(position))  # log ψ
    log_evidence = float(log_ahead[0])
    for _ in range(position.remaining):
        if not any(going):
            break
        output = model(input_ids=given, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        if output.logits.shape[-1] < words:
            raise InputError(
                f"the model has {output.logits.shape[-1]:,} tokens, but the guide is for {words:,}: both models need "
                "the same tokenizer"
            )
        # A text that is over has a row too, a copy of another, so that every call has the same shape.
        rows = [row if alive else going.index(True) for row, alive in enumerate(going)]
        log_probs = output.logits[rows, -1].float().log_softmax(1)[:, :words]
        known = log_probs.logsumexp(1)  # of the tokens of the guide
        log_probs = log_probs - known[:, None]
        bound = [number for number, row in enumerate(rows) if not settled[states[row]]]
        if bound and others:
            log_probs[torch.tensor(bound)[:, None], others] = NEG_INF
        steered = steering(texts[rows], log_probs)
        assert steering.log_masses is not None  # after a call
        drawn = torch.multinomial(steered.exp(), 1, generator=generator)
        ahead = (steered.gather(1, drawn) - log_probs.gather(1, drawn))[:, 0] + steering.log_masses  # log ψ
        alive = torch.tensor(going, device=device)
        log_weights += torch.where(alive, known + steering.log_masses - log_ahead, 0.0)
        log_ahead = torch.where(alive, ahead.clamp(max=0.0).double(), log_ahead)
        given = torch.where(alive[:, None], drawn, texts[:, -1:])  # texts that are over repeat their last token
        texts = torch.cat([texts, given], 1)
        for row, token in enumerate(given[:, 0].tolist()):
            if going[row]:
                states[row] = automaton.step(states[row], token)
                going[row] = not (token in ends and accepting[states[row]] if ends else settled[states[row]])
        # Nothing can go wrong with a text that is over, whatever the HMM expected after its last token: ψ is 1.
        over = ~torch.tensor(going, device=device)
        log_weights -= torch.where(over, log_ahead, 0.0)
        log_ahead = torch.where(over, 0.0, log_ahead)
        share = log_weights.log_softmax(0)
        if float((2 * share).logsumexp(0).neg().exp()) < resample_below * num_particles:
            log_evidence += float(log_weights.logsumexp(0)) - math.log(num_particles)
            kept = _resample(share.exp(), generator)
            texts, given, log_ahead = texts[kept], given[kept], log_ahead[kept]
            states, going = [states[row] for row in kept.tolist()], [going[row] for row in kept.tolist()]
            cache.reorder_cache(kept)
            log_weights = torch.zeros_like(log_weights)
    log_evidence += float(log_weights.logsumexp(0)) - math.log(num_particles)
    return Particles(texts[:, input_ids.shape[1] :], log_weights.log_softmax(0), log_evidence)


def end_tokens(model: Any) -> set[int]:
    """Return the end-of-text tokens of a model of transformers; none if it names none."""
    given = getattr(getattr(model, "generation_config", None) or getattr(model, "config", None), "eos_token_id", None)
    return set() if given is None else {given} if isinstance(given, int) else set(given)


def _resample(weights: Tensor, generator: torch.Generator) -> Tensor:
    """Return the indices of as many draws as there are weights [P], by one uniform number (systematic resampling)."""
    count = len(weights)
    start = torch.rand((), generator=generator, device=weights.device, dtype=weights.dtype)
    points = (torch.arange(count, device=weights.device) + start) / count
    return torch.searchsorted(weights.cumsum(0), points).clamp(max=count - 1)
