"""Steering another model: exact if it is the HMM itself, accepted text for every model, for beams and samples."""

import itertools
import re
import warnings
from typing import Any

import pytest
import torch
from helpers.causal import tiny_llama
from helpers.oracle import random_hmm
from torch import Tensor

from hmmlm import HMM, Guide, InputError, InputWarning, Steering
from hmmlm.constrain import guided, steering
from hmmlm.constrain.automaton import containing
from hmmlm.data.tokenizers import WordTokenizer
from hmmlm.lm.lm import LanguageModel

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


@pytest.mark.filterwarnings("ignore:.*before the constraint was satisfied")
def test_rows_may_be_copied_and_reordered() -> None:
    guide = make_guide(1)
    scores = torch.randn(3, WORDS + 2, generator=torch.Generator().manual_seed(0))
    kept = Steering(guide, guide.begin())
    kept(rows([], [], []), scores)
    kept(rows([1], [2], [1]), scores)
    after = kept(rows([2, 1], [1, 2], [2, 2]), scores)
    for row, text in enumerate(([2, 1], [1, 2], [2, 2])):
        alone = Steering(guide, guide.begin())
        for before in ([], text[:1]):
            alone(rows(before), scores[:1])
        torch.testing.assert_close(alone(rows(text), scores[row : row + 1])[0], after[row])
    assert bool((after[:, WORDS:] == -torch.inf).all())  # tokens outside the HMM's vocabulary


@pytest.mark.filterwarnings("ignore:.*before the constraint was satisfied")
def test_texts_in_turn_and_texts_that_go_far_back_keep_their_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    hmm = HMM(*(p.log() for p in random_hmm(3, WORDS, 3)))
    guide = Guide(hmm, containing([1, 2], WORDS).until(END), 200)
    texts = torch.randint(2, WORDS, (2, 150), generator=torch.Generator().manual_seed(0)).tolist()
    scores, advanced = torch.zeros(1, WORDS, dtype=torch.float64), list[int]()
    inner = guided.advance_states
    for module in (guided, steering):
        monkeypatch.setattr(module, "advance_states", lambda *given: advanced.append(len(given[2])) or inner(*given))
    kept = Steering(guide, guide.begin())
    kept(rows([]), scores)
    for length in range(1, 151):
        for text in texts:
            kept(rows(text[:length]), scores)
    assert len(advanced) <= 300  # one token of each text at a time
    for length in (150, 149, 20):
        position = guide.begin()
        for token in texts[0][:length]:
            position = guide.advance(position, token)
        after = kept(rows(texts[0][:length]), scores)
        torch.testing.assert_close(after[0], guide.log_probs_accept(position).log_softmax(0))


def test_an_error_does_not_spoil_the_next_prompt() -> None:
    guide = make_guide()
    kept, scores = Steering(guide, guide.begin()), torch.zeros(2, WORDS)
    kept(rows([], []), scores)
    with pytest.raises(InputError, match="token 99 is outside the vocabulary"):
        kept(rows([1], [99]), scores)
    after = kept(torch.tensor([[5, 5, 5]] * 2), scores)
    torch.testing.assert_close(after, Steering(guide, guide.begin())(rows([], []), scores))


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


def make_lm() -> LanguageModel:
    words = ["<unk>", "<eos>", *"abcdef"]
    return LanguageModel(HMM(*(p.log() for p in random_hmm(4, 8, 0))), WordTokenizer(words))


@pytest.mark.parametrize("how", [{"do_sample": True, "num_return_sequences": 8}, {"num_beams": 4}])
def test_generate_method_of_transformers(how: dict[str, Any]) -> None:
    lm, model = make_lm(), tiny_llama(10, eos=1, pad=9)
    prompt, unfinished = torch.tensor([lm.tokenizer.encode("d")]), 0
    for ended in (True, False):
        guide = lm.guide(must=["a b", "f"], never=["c"], prompt="d", max_new_tokens=6, require_eos=ended)
        result = model.generate(prompt, logits_processor=[Steering(*guide)], max_new_tokens=6, **how)
        assert len({tuple(row) for row in result.tolist()}) > 1 or "num_beams" in how
        for row in result.tolist():
            assert not ended or 1 in row
            unfinished += 1 not in row
            text = lm.tokenizer.decode(row[: row.index(1)] if 1 in row else row)
            assert "a b" in text and "f" in text and "c" not in text, text
    assert unfinished or "num_beams" in how


@pytest.mark.parametrize("seed", range(12))
def test_exhaustive_beams_find_the_most_likely_accepted_text(seed: int) -> None:
    """Sums of steered scores are conditional log-probabilities if the model is the HMM itself."""
    guide = make_guide(seed)
    length, automaton = 4, guide.automaton
    guide = Guide(guide.hmm, automaton, length)
    texts = [text for text in itertools.product(range(WORDS), repeat=length) if automaton.accepts(text)]
    log_probs = guide.hmm.log_likelihood(texts)
    total = torch.zeros(1, dtype=torch.float64)
    beams, steering = [()], Steering(guide, guide.begin())
    for _ in range(length):
        states = []
        for beam in beams:
            position = guide.begin()
            for token in beam:
                position = guide.advance(position, token)
            states.append(position.log_state)
        open_beams = [automaton.read(beam) != automaton.read([1, 2, END]) for beam in beams]
        own = guide.hmm.emit(torch.stack(states))
        steered = steering(rows(*map(list, beams)), own)
        torch.testing.assert_close(steered[open_beams].exp().sum(1), torch.ones(sum(open_beams), dtype=own.dtype))
        scores = total[:, None] + steered
        total, beams = scores.flatten(), [(*beam, token) for beam in beams for token in range(WORDS)]
        possible = (total > -torch.inf).nonzero().flatten().tolist()
        total, beams = total[possible], [beams[i] for i in possible]
    assert set(beams) == set(texts)
    by_text = dict(zip(beams, total.tolist(), strict=True))
    expected = (log_probs - log_probs.logsumexp(0)).tolist()
    # Once a line has ended, the model's own scores are kept: its tokens are conditioned on acceptance all the same.
    for text, log_prob in zip(texts, expected, strict=True):
        assert abs(by_text[text] - log_prob) < 1e-6
    assert max(by_text, key=by_text.__getitem__) == texts[int(log_probs.argmax())]


def test_each_prompt_of_a_padded_batch_has_its_own_position() -> None:
    lm, model = make_lm(), tiny_llama(10, eos=1, pad=9)
    options: dict[str, Any] = {"never": ["a b"], "max_new_tokens": 8, "require_eos": False}
    prompts = ["d e", "a"]
    ids = torch.tensor([lm.tokenizer.encode("d e"), [9, *lm.tokenizer.encode("a")]])
    mask = torch.tensor([[1, 1], [0, 1]])
    how = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": True, "num_return_sequences": 64, "top_k": 0}
    guided = [lm.guide(prompt=prompt, **options) for prompt in prompts]
    assert guided[0][0] is guided[1][0]  # one guide, two positions
    steering = Steering.batch(guided)
    for _ in range(2):  # a second call starts from the prompts again
        texts = [
            lm.tokenizer.decode([t for t in row if t < 8])
            for row in model.generate(ids, logits_processor=[steering], **how).tolist()
        ]
        assert not any(re.search(r"\ba b\b", text) for text in texts)
        assert any(text.startswith("a ") for text in texts)
    with pytest.raises(InputError, match="row 64 does not end with the tokens of the prompt of its guide"):
        model.generate(ids, logits_processor=[Steering(*guided[0])], **how)
    with pytest.raises(InputError, match="3 rows for 2 guides"):
        Steering.batch(guided)(torch.tensor([[2], [3], [4]]), torch.zeros(3, 8))


def test_prompts_with_different_constraints_share_a_batch() -> None:
    lm, model = make_lm(), tiny_llama(10, eos=1, pad=9)
    wanted = [{"must": ["a b"]}, {"never": ["d", "e"]}, {"regex": "(c )?f d"}]
    guided = [lm.guide(prompt="f", max_new_tokens=6, **each) for each in wanted]  # type: ignore[arg-type]
    ids = torch.tensor([lm.tokenizer.encode("f")] * 3)
    for how in ({"num_beams": 3}, {"do_sample": True}):
        result = model.generate(ids, logits_processor=[Steering.batch(guided)], max_new_tokens=6, **how)
        lines = [lm.tokenizer.decode(row[: row.index(1)]) for row in result.tolist()]
        assert "a b" in lines[0] and not {"d", "e"} & set(lines[1].split()), lines
        assert lines[2] in ("f f d", "f c f d")


def test_text_continues_after_the_tokens_of_the_guide() -> None:
    lm, model = make_lm(), tiny_llama(10, eos=1, pad=9)
    prompt = torch.tensor([lm.tokenizer.encode("d")])
    for options in ({"must": ["a"]}, {"must": ["a"], "never": ["b c"]}):
        guide = lm.guide(prompt="d", max_new_tokens=5, require_eos=False, **options)  # type: ignore[arg-type]
        how = {"max_new_tokens": 16, "do_sample": True, "num_return_sequences": 32, "top_k": 0}
        result = model.generate(prompt, logits_processor=[Steering(*guide)], **how)
        assert result.shape[1] > 6
        for row in result.tolist():
            line = lm.tokenizer.decode([t for t in (row[: row.index(1)] if 1 in row else row) if t < 8])
            assert "a" in line.split()[1:6] and ("never" not in options or "b c" not in line), line


def test_a_satisfied_constraint_costs_nothing() -> None:
    lm = make_lm()
    guide, position = lm.guide(must=["a"], max_new_tokens=5, require_eos=False)
    settled = guide.automaton.settled()
    assert not settled[position.automaton] and settled[guide.automaton.read([2])]  # though <eos> leads elsewhere
    assert settled[guide.automaton.read([2, 1])]


@pytest.mark.filterwarnings("error::hmmlm.InputWarning")
def test_draft_models_and_prompt_lookup_may_go_back() -> None:
    lm, model = make_lm(), tiny_llama(10, eos=1, pad=9)
    prompt = torch.tensor([lm.tokenizer.encode("d e d e d")])
    guide = lm.guide(must=["a b", "f"], never=["c"], prompt="d e d e d", max_new_tokens=12)
    plain = model.generate(prompt, logits_processor=[Steering(*guide)], max_new_tokens=12, do_sample=False)
    steering = Steering(*guide)
    for how in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": tiny_llama(10, eos=1, pad=9, seed=1)}, {}):
        result = model.generate(prompt, logits_processor=[steering], max_new_tokens=12, do_sample=False, **how)
        assert torch.equal(result, plain), how


def test_a_language_model_makes_the_processor_of_one_prompt_or_of_several() -> None:
    lm = make_lm()
    asked: dict[str, Any] = {"must": ["a b"], "regex": "[a-e ]+", "max_new_tokens": 6, "require_eos": False}
    for prompts in ("d", ["d", "c"]):
        given = [prompts] if isinstance(prompts, str) else prompts
        ids = torch.tensor([lm.tokenizer.encode(prompt) for prompt in given])
        scores = torch.randn(len(ids), 10, generator=torch.Generator().manual_seed(0))
        expected = Steering.batch([lm.guide(prompt=prompt, **asked) for prompt in given], 0.7)(ids, scores.clone())
        found = lm.logits_processor(prompt=prompts, weight=0.7, **asked)(ids, scores.clone())
        assert torch.equal(found, expected) and not torch.equal(found, scores)
    with pytest.raises(InputError, match="prompt must be a string, or a list of one for each row"):
        lm.logits_processor(prompt=[])


def test_stopping_before_the_constraint_is_satisfied_warns() -> None:
    lm, model = make_lm(), tiny_llama(10, eos=1, pad=9)
    prompt = torch.tensor([lm.tokenizer.encode("d")])
    steering = Steering(*lm.guide(must=["a b c d e f"], prompt="d", max_new_tokens=12))
    model.generate(prompt, logits_processor=[steering], max_new_tokens=4, do_sample=False)
    message = "1 text stopped after 4 tokens, before the constraint was satisfied: the guide is for 12 tokens"
    with pytest.warns(InputWarning, match=message):  # at the next prompt
        model.generate(torch.tensor([[6, 5]]), logits_processor=[steering], max_new_tokens=4, do_sample=False)
    with pytest.warns(InputWarning, match=message):
        del steering
    steering = Steering(*lm.guide(must=["a b c d e f"], prompt="d", max_new_tokens=12))
    model.generate(prompt, logits_processor=[steering], max_new_tokens=12, do_sample=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del steering


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_report_counts_the_choices_that_steering_changed(dtype: torch.dtype) -> None:
    guide = make_guide()
    steering = Steering(guide, guide.begin())
    generator, changed = torch.Generator().manual_seed(2), 0
    for _ in range(40):
        scores = torch.randn(1, WORDS, generator=generator).to(dtype)
        after = steering(rows([]), scores)
        changed += int(scores.argmax() != after.argmax())
    assert 0 < changed < 40
    assert steering.report.tokens == 40 and steering.report.changed == changed


def test_the_weight_trades_naturalness_for_certainty() -> None:
    guide = make_guide()
    scores = torch.randn(1, WORDS, generator=torch.Generator().manual_seed(1)).double()
    chances = guide.log_probs_accept(guide.begin())
    for weight in (0.0, 0.5, 1.0, 3.0):
        steering = Steering(guide, guide.begin(), weight=weight)
        allowed = torch.where(
            chances > -torch.inf, weight * torch.where(chances > -torch.inf, chances, 0.0), -torch.inf
        )
        torch.testing.assert_close(steering(rows([]), scores)[0], (scores[0] + allowed).log_softmax(0))
    with pytest.raises(InputError, match="weight must be a number of at least 0, not -1"):
        Steering(guide, guide.begin(), weight=-1)
    mistakes: list[Any] = [lambda: Steering(guide, 2), lambda: Steering.batch((guide, guide.begin()))]  # type: ignore
    for mistake in mistakes:
        with pytest.raises(InputError, match="a guide and its position are needed"):
            mistake()
    own = torch.tensor([[0.0, 5.0, 0.0, 9.0]])  # token 3 is forbidden
    steering = Steering(guide, guide.begin())
    steering(rows([]), own)
    assert steering.report == (1, 1)


def test_text_is_streamed() -> None:
    lm, model = make_lm(), tiny_llama(10, eos=1, pad=9)

    class Streamer:
        def __init__(self) -> None:
            self.tokens: list[int] = []

        def put(self, value: Tensor) -> None:
            self.tokens = [*self.tokens, *value.flatten().tolist()]

        def end(self) -> None:
            pass

    prompt, streamer = torch.tensor([lm.tokenizer.encode("d")]), Streamer()
    processor = Steering(*lm.guide(must=["a b"], prompt="d", max_new_tokens=6))
    result = model.generate(prompt, logits_processor=[processor], max_new_tokens=6, do_sample=True, streamer=streamer)
    assert streamer.tokens == result[0].tolist() and "a b" in lm.tokenizer.decode(streamer.tokens)


def test_a_text_that_is_over_repeats_its_end_if_the_model_has_another() -> None:
    lm = LanguageModel(HMM(*(p.log() for p in random_hmm(3, 6, 1))), WordTokenizer(["<unk>", "<eos>", *"abcd"]))
    guided = lm.guide(choice=["a b", "c"], max_new_tokens=8, prompt="d")
    for how in ({"do_sample": True, "num_return_sequences": 8}, {"num_beams": 3, "num_return_sequences": 2}):
        model = tiny_llama(6, eos=3, pad=3)  # its end token is an ordinary one of the HMM
        model.generation_config.eos_token_id = None
        texts = model.generate(torch.tensor([[5]]), logits_processor=[Steering(*guided)], max_new_tokens=8, **how)
        for row in texts.tolist():
            text = row[1 : row.index(1)]
            assert text in ([2, 3], [4])
            assert set(row[1 + len(text) :]) == {1}


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_longer_prompt_is_not_a_continuation(length: int) -> None:
    lm = LanguageModel(HMM(*(p.log() for p in random_hmm(3, 6, 1))), WordTokenizer(["<unk>", "<eos>", *"abcd"]))
    model = tiny_llama(6, eos=1, pad=1)
    steering = Steering(*lm.guide(must=["a"], never=["b"], max_new_tokens=5))
    for prompt in ([4], [4, 2, 5][: length + 1], [4, 3, 5][: length + 1]):
        given = torch.tensor([prompt])
        rows = model.generate(
            given, logits_processor=[steering], max_new_tokens=5, do_sample=True, num_return_sequences=9
        )
        new = rows[:, len(prompt) :]
        assert bool((new == 2).any(1).all()) and not bool((new == 3).any())


@pytest.mark.parametrize("how", [{"bad_words_ids": [[2]]}, {"suppress_tokens": [2], "do_sample": True}])
def test_a_model_that_forbids_what_the_constraint_allows_is_named(how: dict[str, Any]) -> None:
    lm = LanguageModel(HMM(*(p.log() for p in random_hmm(3, 5, 1))), WordTokenizer(["<unk>", "<eos>", *"abc"]))
    steering = Steering(*lm.guide(choice=["a"], max_new_tokens=5))
    with pytest.raises(InputError, match="probability zero to every token that the constraint allows"):
        tiny_llama(5, eos=1, pad=1).generate(torch.tensor([[4]]), logits_processor=[steering], max_new_tokens=5, **how)
