"""Steering another model: exact if it is the HMM itself, accepted text for every model, for beams and samples."""

from typing import Any

import pytest
import torch
from helpers.oracle import random_hmm
from torch import Tensor

from hmmlm import HMM, Guide, InputError, Steering
from hmmlm.data.tokenizers import WordTokenizer
from hmmlm.hmm.automaton import containing
from hmmlm.text.lm import LanguageModel

END, WORDS, LENGTH = 0, 4, 6


def make_guide(seed: int = 0) -> Guide:
    hmm = HMM(*(p.log() for p in random_hmm(3, WORDS, seed)))
    return Guide(hmm, (containing([1, 2], WORDS) & containing([3], WORDS).complement()).until(END), LENGTH)


def rows(*texts: list[int]) -> Tensor:
    """Return rows of token ids that begin with a prompt of two tokens, which the guide does not read."""
    return torch.tensor([[7, 9, *text] for text in texts])


def test_an_hmm_steered_by_itself_is_conditioned_on_the_constraint() -> None:
    guide = make_guide()
    steering = Steering(guide, guide.begin())
    for text in ([], [1], [1, 1], [1, 1, 2], [1, 1, 2, 2]):
        position = guide.begin()
        for token in text:
            position = guide.advance(position, token)
        own = guide.hmm.emit(position.log_state)
        steered = steering(rows(text), own[None])[0]
        torch.testing.assert_close(steered.log_softmax(0), guide.next_token(position))
    assert torch.equal(steered[[3]], torch.tensor([-torch.inf], dtype=steered.dtype))


def test_rows_may_be_copied_and_reordered() -> None:
    guide = make_guide(1)
    scores = torch.randn(3, WORDS + 2, generator=torch.Generator().manual_seed(0))
    kept = Steering(guide, guide.begin())
    kept(rows([], [], []), scores)
    kept(rows([1], [2], [1]), scores)
    after = kept(rows([2, 1], [1, 2], [2, 2]), scores)
    for row, text in enumerate(([2, 1], [1, 2], [2, 2])):
        alone = Steering(guide, guide.begin())
        alone(rows([]), scores[:1])
        torch.testing.assert_close(alone(rows(text), scores[row : row + 1])[0], after[row])
    assert bool((after[:, WORDS:] == -torch.inf).all())  # tokens outside the HMM's vocabulary


def test_the_text_of_any_model_is_accepted() -> None:
    guide, generator = make_guide(2), torch.Generator().manual_seed(0)
    steering, generated = Steering(guide, guide.begin()), torch.empty(50, 0, dtype=torch.long)
    table = torch.randn(WORDS + 1, WORDS + 1, generator=generator)  # tokens 3 and 4 are as likely as others
    for _ in range(LENGTH):
        scores = table[generated[:, -1] if generated.shape[1] else torch.zeros(50, dtype=torch.long)]
        probs = steering(generated, scores).softmax(1)
        generated = torch.cat([generated, torch.multinomial(probs, 1, generator=generator)], 1)
    assert len({tuple(row) for row in generated.tolist()}) > 5
    ended = 0
    for row in generated.tolist():
        line = row[: row.index(END) + 1]
        assert guide.automaton.accepts(line), row
        ended += 4 in row[len(line) :]
    assert ended  # tokens after the end are not constrained


def test_scores_after_the_end_of_a_line_are_unchanged() -> None:
    guide = make_guide()
    steering = Steering(guide, guide.begin())
    scores = torch.randn(1, WORDS + 2)
    for text in ([], [1], [1, 2]):
        assert not torch.equal(steering(rows(text), scores), scores)
    assert torch.equal(steering(rows([1, 2, END]), scores), scores)
    assert torch.equal(steering(rows([1, 2, END, WORDS + 1]), scores), scores)  # padding outside the HMM's vocabulary


def test_texts_and_scores_that_do_not_fit_are_named() -> None:
    guide = make_guide()
    steering = Steering(guide, guide.begin())
    with pytest.raises(InputError, match="scores are for 3 tokens, but the guide is for 4: both models need the same"):
        steering(rows([]), torch.zeros(1, 3))
    steering(rows([1, 1]), torch.zeros(1, WORDS))
    steering(rows([1, 1, 2]), torch.zeros(1, WORDS))
    for text in ([], [1, 1], [1, 2]):
        with pytest.raises(InputError, match="does not continue the previous one: create a new Steering for every"):
            steering(rows(text), torch.zeros(1, WORDS))


@pytest.mark.parametrize("how", [{"do_sample": True, "num_return_sequences": 8}, {"num_beams": 4}])
def test_generate_method_of_transformers(how: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")

    words = ["<unk>", "<eos>", *"abcdef"]
    lm = LanguageModel(HMM(*(p.log() for p in random_hmm(4, 8, 0))), WordTokenizer(words))
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=10,
            hidden_size=8,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            eos_token_id=1,
            pad_token_id=9,
            bos_token_id=None,
        )
    )
    prompt, unfinished = torch.tensor([lm.tokenizer.encode("d")]), 0
    for ended in (True, False):
        guide = lm.guide(must=["a b", "f"], never=["c"], prompt="d", max_new_tokens=6, ended=ended)
        result = model.generate(prompt, logits_processor=[Steering(*guide)], max_new_tokens=6, **how)
        assert len({tuple(row) for row in result.tolist()}) > 1 or "num_beams" in how
        for row in result.tolist():
            assert not ended or 1 in row
            unfinished += 1 not in row
            text = lm.tokenizer.decode(row[: row.index(1)] if 1 in row else row)
            assert "a b" in text and "f" in text and "c" not in text, text
    assert unfinished
