"""Sequential Monte Carlo against the list of all texts."""

import itertools
import math

import pytest
import torch
from helpers.causal import tiny_llama
from helpers.oracle import random_hmm

from hmmlm import HMM, Guide, InputError, sample_particles
from hmmlm.constrain.automaton import containing
from hmmlm.data.tokenizers import WordTokenizer
from hmmlm.lm.lm import LanguageModel

WORDS = ["<unk>", "<eos>", *"abc"]
LENGTH = 5


def test_weighted_texts_follow_the_model_given_the_constraint() -> None:
    model = tiny_llama(6, eos=1, pad=5)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4)  # a model that differs much from the HMM
    lm = LanguageModel(HMM(*(p.log() for p in random_hmm(3, 5, 1))), WordTokenizer(WORDS))
    guide, position = lm.guide(must=["a b"], max_new_tokens=LENGTH, prompt="c")
    prompt = torch.tensor([[4]])
    exact: dict[tuple[int, ...], float] = {}
    for size in range(1, LENGTH):
        for text in itertools.product((0, 2, 3, 4), repeat=size):
            if guide.automaton.accepting[guide.automaton.read([*text, 1], position.automaton)]:
                row = torch.tensor([[4, *text, 1]])
                with torch.no_grad():
                    log_probs = model(row[:, :-1]).logits[0].double().log_softmax(1)
                exact[*text, 1] = float(log_probs.gather(1, row[0, 1:, None]).sum().exp())
    evidence = sum(exact.values())
    found = dict.fromkeys(exact, 0.0)
    particles = sample_particles(model, prompt, guide, position, num_particles=4000, seed=0)
    for row, log_weight in zip(particles.tokens.tolist(), particles.log_weights.tolist(), strict=True):
        text = tuple(row[: row.index(1) + 1])
        found[text] += math.exp(log_weight)
    distance = sum(abs(found[text] - p / evidence) for text, p in exact.items()) / 2
    assert distance < 0.06
    steered = sample_particles(model, prompt, guide, position, num_particles=4000, seed=0, resample_below=0.0)
    biased = dict.fromkeys(exact, 0.0)
    for row in steered.tokens.tolist():
        biased[tuple(row[: row.index(1) + 1])] += 1 / 4000
    assert sum(abs(biased[text] - p / evidence) for text, p in exact.items()) / 2 > 2 * distance
    for estimate in (particles.log_evidence, steered.log_evidence):
        assert abs(estimate - math.log(evidence)) < 0.15
    assert tuple(particles.draw(seed=1)[: particles.draw(seed=1).index(1) + 1]) in exact


def test_texts_go_on_after_the_constraint_is_satisfied() -> None:
    model = tiny_llama(6, eos=1, pad=5)
    lm = LanguageModel(HMM(*(p.log() for p in random_hmm(3, 5, 1))), WordTokenizer(WORDS))
    guide, position = lm.guide(must=["a"], max_new_tokens=12, prompt="c", require_eos=False)
    rows = sample_particles(model, torch.tensor([[4]]), guide, position, num_particles=200, seed=0).tokens.tolist()
    texts = [row[: row.index(1)] if 1 in row else row for row in rows]
    assert all(2 in text for text in texts)
    after = [text[text.index(2) + 1 :] for text in texts]
    assert max(map(len, after)) > 6
    assert {token for rest in after for token in rest} == {0, 2, 3, 4}  # not the last one, repeated


def test_bad_arguments_are_named() -> None:
    lm = LanguageModel(HMM(*(p.log() for p in random_hmm(3, 5, 1))), WordTokenizer(WORDS))
    model = tiny_llama(6, eos=1, pad=5)
    guide, position = lm.guide(must=["a b"], max_new_tokens=LENGTH, prompt="c")
    with pytest.raises(InputError, match="does not end with the tokens of the prompt of the guide"):
        sample_particles(model, torch.tensor([[2]]), guide, position)
    with pytest.raises(InputError, match=r"input_ids must have shape \[1, tokens\], one prompt, not \[2, 1\]"):
        sample_particles(model, torch.tensor([[4], [4]]), guide, position)
    with pytest.raises(InputError, match="num_particles must be at least 1"):
        sample_particles(model, torch.tensor([[4]]), guide, position, num_particles=0)


def test_texts_of_a_guide_without_an_end_follow_the_model() -> None:
    model, hmm = tiny_llama(5, eos=1, pad=0), HMM(*(p.log() for p in random_hmm(3, 5, 1)))
    guide = Guide(hmm, containing([2], 5) & ~containing([4], 5), 5)  # the model's end token 1 is like any other

    def accepted(text: tuple[int, ...]) -> bool:
        return bool(guide.automaton.accepting[guide.automaton.read(list(text))])

    exact: dict[tuple[int, ...], float] = {}
    for text in itertools.product(range(5), repeat=5):
        ends = [n for n in range(1, 6) if text[n - 1] == 1 and accepted(text[:n])]
        text = text[: ends[0]] if ends else text
        if accepted(text) and text not in exact:
            row = torch.tensor([[4, *text]])
            with torch.no_grad():
                log_probs = model(row[:, :-1]).logits[0].double().log_softmax(1)
            exact[text] = float(log_probs.gather(1, row[0, 1:, None]).sum().exp())
    particles = sample_particles(model, torch.tensor([[4]]), guide, guide.begin(), num_particles=4000, seed=0)
    assert abs(particles.log_evidence - math.log(sum(exact.values()))) < 0.03
    lengths = dict.fromkeys(range(1, 6), 0.0)
    for row, log_weight in zip(particles.tokens.tolist(), particles.log_weights.tolist(), strict=True):
        length = next(n for n in range(1, 6) if tuple(row[:n]) in exact)
        assert set(row[length:]) <= {1}
        lengths[length] += math.exp(log_weight)
    for length, found in lengths.items():
        expected = sum(p for text, p in exact.items() if len(text) == length) / sum(exact.values())
        assert abs(found - expected) < 0.05


def test_a_model_with_other_end_tokens_does_not_end_texts_early() -> None:
    model = tiny_llama(6, eos=1, pad=5)
    model.generation_config.eos_token_id = [3, 4]  # ordinary tokens of the HMM, and not its end
    lm = LanguageModel(HMM(*(p.log() for p in random_hmm(3, 5, 1))), WordTokenizer(WORDS))
    guide, position = lm.guide(must=["a"], max_new_tokens=8, prompt="c")
    for row in sample_particles(model, torch.tensor([[4]]), guide, position, num_particles=100, seed=0).tokens.tolist():
        text = row[: row.index(1)]
        assert 2 in text and not {3, 4} & set(text)
        assert set(row[len(text) :]) == {1}
