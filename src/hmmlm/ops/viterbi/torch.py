"""The most likely path without back-pointers.

Only the best scores are computed on the way forward (a maximum is several times cheaper than a maximum with its
index, and the [B, Z, Z] sums stay in cache, a piece at a time); on the way back the origin of one state a step is
found again, O(Z) each. Scores are kept relative to their largest, so that float32 serves for any length.
"""

import torch
from torch import Tensor

from hmmlm.ops.scan.naive import NEG_INF, Evidence, Parameters

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
    vocabulary, words = torch.unique(tokens, return_inverse=True)
    rows = log_emission.index_select(1, vocabulary.clamp(min=0)).t()
    scores = torch.where((vocabulary < 0)[:, None], 0.0, rows).contiguous()
    into = log_transition.t().contiguous()  # row = to-state

    best = log_start.new_full((steps, batch, log_start.shape[0]), NEG_INF)
    offset = torch.zeros(batch, dtype=torch.float64, device=tokens.device)
    best[0] = log_start + scores[words[:, 0]]
    for t in range(steps):
        here = best[t, : active[t]]
        if t:
            best_into(best[t - 1, : active[t]], into, here)
            here += scores[words[: active[t], t]]
        peak = here.amax(1)
        peak = torch.where(peak == NEG_INF, 0.0, peak)
        here -= peak[:, None]
        offset[: active[t]] += peak

    path = torch.full((batch, steps), -1, device=tokens.device)
    last = torch.full((batch,), NEG_INF, dtype=torch.float64, device=tokens.device)
    for t in range(steps - 1, -1, -1):
        ahead = active[t + 1] if t + 1 < steps else 0
        if ahead < active[t]:
            value, path[ahead : active[t], t] = best[t, ahead : active[t]].max(1)
            last[ahead : active[t]] = value
        if ahead:
            path[:ahead, t] = (best[t, :ahead] + into[path[:ahead, t + 1]]).argmax(1)
    log_prob = (offset + last).to(log_start.dtype)
    if order is not None:
        restored = torch.argsort(order)
        path, log_prob = path[restored], log_prob[restored]
    return path, log_prob


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
