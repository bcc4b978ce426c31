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
from hmmlm.errors import InputError
from hmmlm.hmm.checks import check_count, check_number, check_seed
from hmmlm.hmm.constraints import Guide, Position
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
    num: int = 16,
    seed: int | None = None,
    resample_below: float = 0.5,
) -> Particles:
    """Sample texts of a causal model of transformers given a constraint, with `num` particles.

    A text is over with the end token of the guide, the only one before the constraint is satisfied. A text whose guide
    has none (ended=False) goes on, up to an end token of the model or the length of the guide.

    Args:
        input_ids: [1, T] the prompt.
        guide: of `lm.guide` for the same prompt.
        position: of `lm.guide`, after the prompt.
        resample_below: particles are resampled when their effective number is below this share of `num`.
    """
    check_count("num", num, 1, _LARGEST)
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
    device, words = input_ids.device, guide.automaton.vocab_size
    generator = torch.Generator(device=device)
    generator.seed() if seed is None else generator.manual_seed(seed)
    settled, ends = guide.automaton.settled().tolist(), end_tokens(model)
    others = [] if guide.end is None else [end for end in ends if end != guide.end and end < words]
    ends |= set() if guide.end is None else {guide.end}
    positions, given, cache = [position] * num, input_ids.expand(num, -1), None
    going = list(range(num))
    tokens = torch.empty(num, 0, dtype=torch.long, device=device)
    log_weights = torch.zeros(num, dtype=torch.float64, device=device)
    log_ahead = torch.full((num,), guide.chance(position), dtype=torch.float64, device=device)  # log ψ
    log_evidence = float(log_ahead[0])
    for _ in range(position.remaining):
        if not going:
            break
        output = model(input_ids=given, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        if output.logits.shape[-1] < words:
            raise InputError(
                f"the model has {output.logits.shape[-1]:,} tokens, but the guide is for {words:,}: both models need "
                "the same tokenizer"
            )
        log_probs = output.logits[going, -1].double().log_softmax(1)[:, :words]
        chances = torch.zeros_like(log_probs)
        bound = [i for i, row in enumerate(going) if not settled[positions[row].automaton]]
        if bound:
            ahead = guide.chances_of([positions[going[i]] for i in bound]).to(log_probs)
            ahead[:, others] = NEG_INF
            chances[bound] = ahead
        steered = log_probs + chances
        total = steered.logsumexp(1)
        if bool((total == NEG_INF).any()):
            raise InputError("the model gives probability zero to every text that satisfies the constraint")
        drawn = torch.multinomial((steered - total[:, None]).exp(), 1, generator=generator)
        log_weights[going] += total - log_ahead[going]
        log_ahead[going] = chances.gather(1, drawn)[:, 0]
        following = given[:, -1:].clone()  # texts that ended repeat their last token
        following[going] = drawn
        chosen = drawn[:, 0].tolist()
        advanced = guide.advance_all([positions[going[i]] for i in bound], [chosen[i] for i in bound]) if bound else []
        positions = [*positions]
        for i, after in zip(bound, advanced, strict=True):
            positions[going[i]] = after
        finished = {row for row, token in zip(going, chosen, strict=True) if token in ends}
        if not ends:
            finished = {row for row in going if settled[positions[row].automaton]}
        going = [row for row in going if row not in finished]
        tokens, given = torch.cat([tokens, following], 1), following
        share = log_weights.log_softmax(0)
        if float((2 * share).logsumexp(0).neg().exp()) < resample_below * num:
            log_evidence += float(log_weights.logsumexp(0)) - math.log(num)
            kept = _resample(share.exp(), generator)
            tokens, given, log_ahead = tokens[kept], given[kept], log_ahead[kept]
            positions = [positions[row] for row in kept.tolist()]
            going = [new for new, old in enumerate(kept.tolist()) if old in set(going)]
            cache.reorder_cache(kept)
            log_weights = torch.zeros_like(log_weights)
    log_evidence += float(log_weights.logsumexp(0)) - math.log(num)
    return Particles(tokens, log_weights.log_softmax(0), log_evidence)


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
