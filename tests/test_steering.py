"""Steering another model: exact where it is the HMM itself, accepted whatever it is, the same for beams and samples."""

import importlib.util
from typing import Any

import oracle
import pytest
import torch
from test_hmm_constraints import WORDS, avoiding
from torch import Tensor

from hmmlm import HMM, Guide, InputError, Steering
from hmmlm.data.tokenizer import WordTokenizer
from hmmlm.hmm.automaton import containing
from hmmlm.lm import LanguageModel

END, LENGTH = 0, 6


def make_guide(seed: int = 0) -> Guide:
    hmm = HMM(*(p.log() for p in oracle.random_hmm(3, WORDS, seed)))
    return Guide(hmm, (containing([1, 2], WORDS) & avoiding([3], WORDS)).until(END), LENGTH)


def rows(*texts: list[int]) -> Tensor:
    """After a prompt of two tokens, which are not the guide's business."""
    return torch.tensor([[7, 9, *text] for text in texts])


def test_an_hmm_steered_by_itself_is_the_hmm_given_the_constraint() -> None:
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


def test_rows_may_be_copied_and_change_places() -> None:
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
    assert bool((after[:, WORDS:] == -torch.inf).all())  # tokens that the HMM does not have


def test_whatever_the_other_model_is_the_text_is_accepted() -> None:
    guide, generator = make_guide(2), torch.Generator().manual_seed(0)
    steering, said = Steering(guide, guide.begin()), torch.empty(50, 0, dtype=torch.long)
    table = torch.randn(WORDS + 1, WORDS + 1, generator=generator)  # likes tokens 3 and 4 as much as any
    for _ in range(LENGTH):
        scores = table[said[:, -1] if said.shape[1] else torch.zeros(50, dtype=torch.long)]
        probs = steering(said, scores).softmax(1)
        said = torch.cat([said, torch.multinomial(probs, 1, generator=generator)], 1)
    assert len({tuple(row) for row in said.tolist()}) > 5
    ended = 0
    for row in said.tolist():
        line = row[: row.index(END) + 1]
        assert guide.automaton.accepts(line), row
        ended += 4 in row[len(line) :]
    assert ended  # what comes after the end is the other model's own


def test_scores_of_a_line_that_is_over_are_left_alone() -> None:
    guide = make_guide()
    steering = Steering(guide, guide.begin())
    scores = torch.randn(1, WORDS + 2)
    for text in ([], [1], [1, 2]):
        assert not torch.equal(steering(rows(text), scores), scores)
    assert torch.equal(steering(rows([1, 2, END]), scores), scores)
    assert torch.equal(steering(rows([1, 2, END, WORDS + 1]), scores), scores)  # padding, which the HMM has not


def test_what_does_not_belong_together_is_refused() -> None:
    guide = make_guide()
    steering = Steering(guide, guide.begin())
    with pytest.raises(InputError, match="scores for 3 tokens, and the guide is for 4: both models need the same"):
        steering(rows([]), torch.zeros(1, 3))
    steering(rows([1, 1]), torch.zeros(1, WORDS))
    steering(rows([1, 1, 2]), torch.zeros(1, WORDS))
    for text in ([], [1, 1], [1, 2]):
        with pytest.raises(InputError, match="does not go on from the last one: make a Steering for every call"):
            steering(rows(text), torch.zeros(1, WORDS))


if importlib.util.find_spec("transformers") is not None:

    @pytest.mark.parametrize("how", [{"do_sample": True, "num_return_sequences": 8}, {"num_beams": 4}])
    def test_generate_of_transformers(how: dict[str, Any]) -> None:
        import transformers

        words = ["<unk>", "<eos>", *"abcdef"]
        lm = LanguageModel(HMM(*(p.log() for p in oracle.random_hmm(4, 8, 0))), WordTokenizer(words))
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
            vocab_size=10, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            eos_token_id=1, pad_token_id=9, bos_token_id=None,
        ))  # fmt: skip
        prompt, going_on = torch.tensor([lm.tokenizer.encode("d")]), 0
        for ended in (True, False):
            guide = lm.guide(must=["a b", "f"], never=["c"], prompt="d", max_new_tokens=6, ended=ended)
            result = model.generate(prompt, logits_processor=[Steering(*guide)], max_new_tokens=6, **how)
            assert len({tuple(row) for row in result.tolist()}) > 1 or "num_beams" in how
            for row in result.tolist():
                assert not ended or 1 in row
                going_on += 1 not in row
                text = lm.tokenizer.decode(row[: row.index(1)] if 1 in row else row)
                assert "a b" in text and "f" in text and "c" not in text, text
        assert going_on
