"""A program of a user, checked by `mypy --strict` (make lint): the public names have types that help."""

from pathlib import Path

import torch
from lightning_fabric.loggers.csv_logs import CSVLogger

import hmmlm

hmm: hmmlm.HMM = hmmlm.HMM.from_probs([0.6, 0.4], [[0.7, 0.3], [0.2, 0.8]], [[0.5, 0.5], [0.1, 0.9]])
tokens, lengths = hmmlm.padded([[0, 1, 1], [1]])
score: torch.Tensor = hmm.log_likelihood(tokens, lengths)
path, log_prob = hmm.viterbi([[0, 1]])
states: list[int] = path[0].tolist()
filtered: hmmlm.Filtered = hmm.filter(tokens, lengths)
final: torch.Tensor = filtered.carry.log_probs
counts: hmmlm.Counts = hmm.expected_counts(tokens, lengths)
learned: hmmlm.HMM = hmmlm.HMM.learn([[0, 1], [1]], num_states=2, restarts=2, seed=1)
figures: list[float] = [learned.score([0, 1, 1], [2, 1]), learned.aic([0, 1]), learned.bic([[0, 1]])]
best: torch.Tensor = learned.predict([0, 1, 1], [2, 1])
chosen: hmmlm.HMM = hmmlm.HMM.choose([[0, 1], [1]], range(1, 3)).best
loaded: hmmlm.HMM = hmmlm.HMM.load("hmm.safetensors")
other: hmmlm.HMM = hmmlm.HMM.random(3, 5, seed=1)
factored: hmmlm.transitions.Factored = hmmlm.transitions.Factored(torch.zeros(4, 2), torch.zeros(4, 2))
by_word: hmmlm.emissions.Blocked = hmmlm.emissions.Blocked(torch.zeros(2, 2), torch.tensor([0, 1]))
blocked: hmmlm.HMM = hmmlm.HMM(torch.full((4,), 0.25).log(), factored, by_word)
union: hmmlm.HMM = hmmlm.HMM.union([hmm.to(torch.float32), blocked], weights=[0.5, 0.5]).to("cpu")
components: tuple[hmmlm.HMM, ...] = union.components


def use(folder: Path) -> list[str]:
    lm = hmmlm.load(folder, device="cpu")
    if isinstance(lm, hmmlm.MixtureModel):
        raise hmmlm.InputError("a mixture is not an HMM")
    perplexity: float = lm.perplexity(["a line"])
    one: str = lm.generate("the", max_new_tokens=5)
    several: list[str] = lm.generate("the", num_samples=2)
    each: list[str] = lm.generate(["the", "a"], top_p=0.9, seed=1)
    for piece in lm.generate("the", stream=True, must=["a list"]):
        one += piece
    words: list[list[tuple[str, float]]] = lm.infill("the ___")
    guide, position = lm.guide(must=["a list"])
    chance: float = guide.log_prob_accept(position)
    lm.save_pretrained(folder / "copy")
    hmmlm.train("my.txt", loggers=[CSVLogger(folder)], train={"epochs": 1})
    again: hmmlm.LanguageModel | hmmlm.MixtureModel = hmmlm.load("owner/name", revision="main")
    if perplexity > chance:
        raise hmmlm.InputError(f"{words[0][0][0]} {again.perplexity([])}")
    return [one, *several, *each]
