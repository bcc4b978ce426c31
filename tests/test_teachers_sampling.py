"""Sampling from a causal language model: the texts are draws from the model, whatever shares their batch."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.causal import BOS, EOS, save_causal

from hmmlm.errors import InputError
from hmmlm.teachers.sampling import SampledText, TextSampler, draw_tokens, open_sampler

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="the extra `teacher` is not installed")
CPU = torch.device("cpu")


def sample(sampler: TextSampler, prompts: list[list[int]], length: int = 30, seed: int = 0) -> list[SampledText]:
    return sampler.sample(prompts, length, seed, lambda tokens: None)


@pytest.mark.slow
def test_tokens_are_drawn_by_their_probabilities() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(1, 300, generator=generator) * 2
    logits[0, [0, 7, 299]] = -torch.inf
    count = 200_000
    tokens, log_probs = draw_tokens(logits.expand(count, -1), torch.rand(count, generator=generator))
    expected = logits[0].softmax(-1)
    found = torch.bincount(tokens, minlength=300) / count
    assert not found[[0, 7, 299]].any()
    assert float(((found - expected).abs() / (expected.clamp(min=1e-9) / count).sqrt()).max()) < 5
    torch.testing.assert_close(log_probs, logits[0].log_softmax(-1)[tokens])
    # the ends of the interval are tokens that are possible
    first, last = (draw_tokens(logits, torch.tensor([u]))[0] for u in (0.0, 1 - 2**-24))
    assert int(first) == 1 and int(last) == 298


def test_log_probs_are_those_of_the_model_with_prompts_of_any_length(tmp_path: Path) -> None:
    model = save_causal(tmp_path, context=64)
    sampler = open_sampler(str(tmp_path), device=CPU)
    prompts = [sampler.encode_prompt(text) for text in ["", "the cat sat", "the dog ran on the mat ."] * 20]
    texts = sample(sampler, prompts)
    lengths = {len(text.tokens) for text in texts}
    assert max(lengths) == 30 and min(lengths) < 16  # rows were removed from the batch on the way
    for prompt, text in zip(prompts, texts, strict=True):
        assert EOS not in text.tokens[:-1] and BOS not in text.tokens
        assert len(text.tokens) == 30 or text.tokens[-1] == EOS
        tokens = torch.tensor([[*prompt, *text.tokens.tolist()]])
        with torch.no_grad():
            log_probs = model(input_ids=tokens).logits[0].log_softmax(-1)
        expected = log_probs[len(prompt) - 1 : -1].gather(1, tokens[0, len(prompt) :, None])[:, 0]
        torch.testing.assert_close(torch.from_numpy(text.log_probs), expected, atol=1e-4, rtol=1e-4)


def test_a_seed_gives_the_same_texts_and_another_one_others(tmp_path: Path) -> None:
    save_causal(tmp_path)
    sampler = open_sampler(str(tmp_path), device=CPU)
    prompts = [sampler.encode_prompt("")] * 8
    first, again, other = (sample(sampler, prompts, seed=seed) for seed in (3, 3, 4))
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a.tokens, b.tokens) for a, b in zip(first, other, strict=True))


def test_rows_of_the_network_without_a_token_are_never_drawn(tmp_path: Path) -> None:
    save_causal(tmp_path, rows=64)
    sampler = open_sampler(str(tmp_path), device=CPU)
    assert sampler.vocab_size == 13
    assert max(text.tokens.max() for text in sample(sampler, [[BOS]] * 64)) < 13


def test_the_tokenizer_is_that_of_the_model_with_the_end_token_it_uses(tmp_path: Path) -> None:
    save_causal(tmp_path, end=BOS)
    sampler = open_sampler(str(tmp_path), device=CPU)
    assert sampler.ends == [EOS, BOS]
    assert {int(text.tokens[-1]) for text in sample(sampler, [[BOS]] * 64) if len(text.tokens) < 30} == {BOS}
    assert sampler.student_tokenizer(BOS).eos_id == BOS
    assert sampler.encode_prompt("the cat") == [BOS, *sampler.student_tokenizer(BOS).encode("the cat")]


def test_a_model_that_cannot_be_sampled_is_refused(tmp_path: Path) -> None:
    import transformers

    def refused(folder: Path, match: str) -> None:
        with pytest.raises(InputError, match=match) as error:
            open_sampler(str(folder), device=CPU)
        assert "\n" not in str(error.value)

    save_causal(tmp_path / "no end", bos_token="[CLS]")
    refused(tmp_path / "no end", "no end-of-text token")
    save_causal(tmp_path / "small", rows=9)
    refused(tmp_path / "small", "has 13 tokens and its network only 9")
    save_causal(tmp_path / "masked")
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=13, **sizes)).save_pretrained(tmp_path / "masked")
    refused(tmp_path / "masked", "no causal language model .BertForMaskedLM")
    save_causal(tmp_path / "words")
    (tmp_path / "words" / "tokenizer.json").unlink()
    refused(tmp_path / "words", "has no tokenizer")
    refused(tmp_path / "absent", "no teacher at")


def test_a_cache_that_grows_in_place_has_the_keys_and_values_of_a_copied_one() -> None:
    from transformers import DynamicCache

    from hmmlm.teachers.growing_cache import GROWTH, GrowingLayer, grow_in_place

    plain, growing = DynamicCache(), DynamicCache()
    for step in range(2 * GROWTH):
        keys, values = torch.randn(2, 5 - step // GROWTH, 3, 1 + (step == 0), 4)  # a prompt of two tokens
        expected, found = plain.update(keys, values, 0), growing.update(keys, values, 0)
        assert all(map(torch.equal, found, expected))
        if step == 0:
            grow_in_place(growing)
            assert isinstance(growing.layers[0], GrowingLayer)
        if step == GROWTH - 1:  # a row is removed in the middle of a buffer
            for cache in (plain, growing):
                cache.batch_select_indices(torch.tensor([0, 2, 3, 4]))
