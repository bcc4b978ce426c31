"""The most likely path without back-pointers.

Only the best scores are computed on the way forward (a maximum is several times cheaper than a maximum with its
index, and the [B, Z, Z] sums stay in cache, a piece at a time); on the way back the origin of one state a step is
found again, O(Z) each. Scores are kept relative to their largest of some steps ago, so that float32 serves for any
length.
"""

import torch
from torch import Tensor

from hmmlm.ops.scan.naive import NEG_INF, Evidence, Parameters

GROUP = 16  # steps between two subtractions of the largest score
CACHE_CELLS = {"cpu": 2**17, "cuda": 2**27}


def viterbi(parameters: Parameters, evidence: Evidence) -> tuple[Tensor, Tensor]:
    """Path [B, T], −1 beyond a length, and log p(path, x) [B]."""
    log_start, log_transition, log_emission = parameters
    tokens, lengths = evidence.tokens, evidence.lengths
    order = None if lengths is None else torch.argsort(lengths, descending=True, stable=True)
    batch, steps = tokens.shape
    active = [batch] * steps
    if lengths is not None and order is not None:
        tokens = tokens[order]
        active = (lengths[order] > torch.arange(steps, device=tokens.device)[:, None]).sum(1).tolist()
    vocabulary, words = torch.unique(tokens.t(), return_inverse=True)
    rows = log_emission.index_select(1, vocabulary.clamp(min=0)).t()
    rows = torch.where((vocabulary < 0)[:, None], 0.0, rows)
    into = log_transition.t().contiguous()  # row = to-state

    best = rows.index_select(0, words.reshape(-1)).view(steps, batch, -1)  # scores of the words, to begin with
    offset = torch.zeros(batch, dtype=torch.float64, device=tokens.device)
    arrived, before = torch.empty_like(best[0]), log_start.expand(batch, -1)
    for t, here in enumerate(best.unbind()):
        count = active[t]
        here = here if count == batch else here[:count]
        if t:
            before = before if count == before.shape[0] else before[:count]
            best_into(before, into, arrived[:count])
            here += arrived[:count]
        else:
            here += log_start
        if t % GROUP == 0:
            peak = here.amax(1)
            peak = torch.where(peak == NEG_INF, 0.0, peak)
            here -= peak[:, None]
            offset[:count] += peak
        before = here

    last = torch.full((batch,), NEG_INF, dtype=torch.float64, device=tokens.device)
    missing = torch.full((batch,), -1, device=tokens.device)
    path: list[Tensor] = []
    for t, here in reversed(list(enumerate(best.unbind()))):
        ahead = active[t + 1] if t + 1 < steps else 0
        found = [(here[:ahead] + into.index_select(0, path[-1][:ahead])).argmax(1)] if ahead else []
        if ahead < active[t]:
            value, state = here[ahead : active[t]].max(1)
            last[ahead : active[t]] = value
            found.append(state)
        if active[t] < batch:
            found.append(missing[active[t] :])
        path.append(found[0] if len(found) == 1 else torch.cat(found))
    log_prob, states = (offset + last).to(log_start.dtype), torch.stack(path[::-1], 1)
    if order is not None:
        restored = torch.argsort(order)
        states, log_prob = states[restored], log_prob[restored]
    return states, log_prob


def best_into(best: Tensor, into: Tensor, out: Tensor) -> None:
    """out[b, j] = max_i best[b, i] + into[j, i], in pieces that stay in cache."""
    batch, states = best.shape
    cells = CACHE_CELLS.get(best.device.type, 2**27)
    columns = max(1, min(states, cells // states))
    rows = max(1, cells // (states * columns))
    buffer = best.new_empty(rows, columns, states)
    for j in range(0, states, columns):
        piece = into[j : j + columns]
        for b in range(0, batch, rows):
            sums = buffer[: min(rows, batch - b), : piece.shape[0]]
            torch.add(best[b : b + rows, None, :], piece, out=sums)
            torch.amax(sums, 2, out=out[b : b + rows, j : j + columns])
