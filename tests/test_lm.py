"""A model with its tokenizer: its files and what may be wrong with them, scores, generation, infilling."""

import itertools
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

import hmmlm
from hmmlm.constrain.guide_cache import GuideCache
from hmmlm.data.tokenizers import HuggingFaceTokenizer
from hmmlm.data.words import WordTokenizer
from hmmlm.emissions import Blocked
from hmmlm.errors import InputError
from hmmlm.hmm import HMM
from hmmlm.lm.blanks import encode_blanks
from hmmlm.lm.ctrlg import load_ctrlg, save_ctrlg
from hmmlm.lm.generation import SamplingOptions, collect, invert, sample_continuations
from hmmlm.lm.lm import LanguageModel, load
from hmmlm.ops import pieces
from hmmlm.scan.composition import matrices
from hmmlm.transitions import Factored

WORDS = ["<unk>", "<eos>", "the", "cat", "dog", "sat", "ran", "."]


def random_hmm(states: int = 5, vocab: int = len(WORDS), seed: int = 0, dtype: torch.dtype = torch.float64) -> HMM:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((states,), (states, states), (states, vocab))
    return HMM(*((2 * torch.randn(s, generator=generator, dtype=dtype)).log_softmax(-1) for s in shapes))


@pytest.fixture
def lm() -> LanguageModel:
    return LanguageModel(random_hmm(), WordTokenizer(WORDS), {"model": {"num_states": 5}})


@pytest.fixture
def saved(lm: LanguageModel, tmp_path: Path) -> Path:
    lm.save(tmp_path / "model")
    return tmp_path / "model"


# --- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_saved_model_is_loaded_unchanged(tmp_path: Path, dtype: torch.dtype) -> None:
    lm = LanguageModel(random_hmm(dtype=dtype), WordTokenizer(WORDS, lowercase=True), {"data": "x", "n": [1, 2.5]})
    lm.save(tmp_path / "deep" / "model")
    again = load(tmp_path / "deep" / "model")
    for before, after in zip(matrices(lm.hmm), matrices(again.hmm), strict=True):
        assert after.dtype == dtype
        assert torch.equal(before, after)
    assert again.config == lm.config
    assert again.tokenizer.fingerprint() == lm.tokenizer.fingerprint()
    assert sorted(p.name for p in (tmp_path / "deep" / "model").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]


def test_a_saved_blocked_model_is_loaded_unchanged(lm: LanguageModel, tmp_path: Path) -> None:
    LanguageModel(blocked_hmm(), lm.tokenizer).save(tmp_path)
    again = load(tmp_path)
    assert again.hmm.kind == "factored × blocked"
    for name, tensor in blocked_hmm().tensors().items():
        assert torch.equal(tensor, again.hmm.tensors()[name])
    rewrite_json(tmp_path / "config.json", **{"transition.kind": "quantum"})
    with pytest.raises(InputError, match=r"transition\.kind is 'quantum'; this hmmlm reads dense, factored"):
        load(tmp_path)


def test_saving_over_another_model_replaces_it_and_leaves_other_files(saved: Path) -> None:
    (saved / "notes.txt").write_text("mine")
    (saved / "tokenizer.model").write_bytes(b"left by a sentencepiece model")
    LanguageModel(random_hmm(3, 3), WordTokenizer(WORDS[:3])).save(saved)
    assert load(saved).hmm.num_states == 3
    assert (saved / "notes.txt").read_text() == "mine"
    assert not (saved / "tokenizer.model").exists()


def test_loading_a_training_run_loads_its_best_model(lm: LanguageModel, tmp_path: Path) -> None:
    lm.save(tmp_path / "run" / "checkpoints" / "step-7")
    (tmp_path / "run" / "best").symlink_to("checkpoints/step-7")
    assert torch.equal(load(tmp_path / "run").hmm.log_start, lm.hmm.log_start)


@pytest.mark.parametrize("stage", ["tensors", "tokenizer", "sync", "move"])
def test_a_full_disk_leaves_the_previous_model_unchanged(
    saved: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    before = {p.name: p.read_bytes() for p in saved.iterdir()}

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    target = {"tensors": "hmmlm.data.modelfolder.write_tensors", "sync": "os.fsync", "move": "os.replace"}
    if stage == "tokenizer":
        monkeypatch.setattr(WordTokenizer, "save", full)
    else:
        monkeypatch.setattr(target[stage], full)
    with pytest.raises(InputError, match=r"cannot (save|write) .*No space left on device.*kept") as error:
        LanguageModel(random_hmm(3, 3), WordTokenizer(WORDS[:3])).save(saved)
    assert "\n" not in str(error.value)
    monkeypatch.undo()
    assert {p.name: p.read_bytes() for p in saved.iterdir()} == before


def test_if_a_file_of_a_model_cannot_be_replaced_all_are_kept(saved: Path) -> None:
    tokenizer, config = (saved / "tokenizer.json").read_bytes(), (saved / "config.json").read_bytes()
    (saved / "model.safetensors").unlink()
    (saved / "model.safetensors").mkdir()
    with pytest.raises(InputError, match=r"cannot save to .*; existing files are kept"):
        LanguageModel(random_hmm(3, 3), WordTokenizer(WORDS[:3])).save(saved)
    assert ((saved / "tokenizer.json").read_bytes(), (saved / "config.json").read_bytes()) == (tokenizer, config)
    assert sorted(p.name for p in saved.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]


def test_a_folder_that_cannot_be_created_is_named(lm: LanguageModel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot save to .*file"):
        lm.save(tmp_path / "file" / "model")


def rewrite_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_folders_without_a_model_are_named(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no model at .*nothing: the folder does not exist"):
        load(tmp_path / "nothing")
    with pytest.raises(InputError, match="is a file, but a model is a folder"):
        load(saved / "config.json")
    with pytest.raises(InputError, match=r"no model in .*should contain model.safetensors"):
        load(tmp_path)
    (tmp_path / "history.jsonl").write_text("")
    with pytest.raises(InputError, match=r"training run .* has no model yet"):
        load(tmp_path)


def test_damaged_safetensors_are_named(saved: Path) -> None:
    path = saved / "model.safetensors"
    content = path.read_bytes()
    for broken in (content[: len(content) // 2], content[:4], b"", b"PK\x03\x04 not this format at all"):
        path.write_bytes(broken)
        with pytest.raises(InputError, match=r"model.safetensors is missing, truncated or not safetensors") as error:
            load(saved)
        assert "\n" not in str(error.value)
    save_file({"weight": torch.zeros(2)}, path)
    with pytest.raises(InputError, match=r"model.safetensors has no log_start: it belongs to another kind of model"):
        load(saved)


def test_damaged_json_is_named(saved: Path) -> None:
    path = saved / "config.json"
    content = path.read_text()
    for broken in (content[: len(content) // 2], ""):
        path.write_text(broken)
        with pytest.raises(InputError, match=r"config.json is truncated or not JSON"):
            load(saved)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=r"config.json is truncated or not JSON"):
        load(saved)
    path.write_text("[1]")
    with pytest.raises(InputError, match=r"config.json is not a JSON object"):
        load(saved)
    path.write_text('{"architectures": ["GPT2LMHeadModel"]}')
    with pytest.raises(InputError, match=r"config.json does not belong to a model of `hmmlm train`"):
        load(saved)
    path.unlink()
    with pytest.raises(InputError, match=r"cannot read .*config.json: No such file"):
        load(saved)


def test_files_of_another_version_or_model_are_named(saved: Path, tmp_path: Path) -> None:
    rewrite_json(saved / "config.json", version=99)
    with pytest.raises(InputError, match="version 99; this hmmlm reads 1 and 2"):
        load(saved)
    rewrite_json(saved / "config.json", version=2, states=6)
    with pytest.raises(InputError, match=r"log_start has shape \[5\], config.json has \[6\]: files of two models"):
        load(saved)


def test_a_tokenizer_with_another_vocabulary_is_an_error(saved: Path) -> None:
    WordTokenizer([*WORDS[:-1], "!"]).save(saved)  # as many words, but one differs
    with pytest.raises(InputError, match=r"vocabulary .* is not the one the model was trained with"):
        load(saved)
    (saved / "tokenizer.json").unlink()
    with pytest.raises(InputError, match="no tokenizer in"):
        load(saved)


def test_files_of_two_models_are_an_error(saved: Path, tmp_path: Path) -> None:
    """The tensors are of the old model, all other files of the new one: same sizes, other words."""
    LanguageModel(random_hmm(seed=1), WordTokenizer([*WORDS[:-1], "!"])).save(tmp_path / "new")
    for name in ("config.json", "tokenizer.json"):
        os.replace(tmp_path / "new" / name, saved / name)
    with pytest.raises(InputError, match="is not the one the model was trained with"):
        load(saved)


def test_a_model_and_tokenizer_of_different_sizes_are_an_error() -> None:
    with pytest.raises(InputError, match="model has a vocabulary of 4, the tokenizer one of 8"):
        LanguageModel(random_hmm(vocab=4), WordTokenizer(WORDS))


# --- scores ---------------------------------------------------------------------------------------------------------


def test_score_is_the_likelihood_of_the_tokens_and_eos(lm: LanguageModel) -> None:
    texts = ["the cat sat .", "", "the unicorn ran", "the dog\nran"]
    tokens = [[2, 3, 5, 7, 1], [1], [2, 0, 6, 1], [2, 4, 1, 6, 1]]
    want = [float(lm.hmm.log_likelihood([t])) for t in tokens]
    torch.testing.assert_close(lm.score(texts), torch.tensor(want, dtype=torch.float64))
    assert lm.perplexity(texts) == pytest.approx(math.exp(-sum(want) / 15))


def test_score_of_many_ragged_texts_keeps_their_order(lm: LanguageModel) -> None:
    texts = [" ".join(WORDS[2 + (i * j) % 6] for j in range((7 * i) % 11)) for i in range(20)]
    with pieces.limit(12):
        scores = lm.score(texts)
    torch.testing.assert_close(scores, torch.cat([lm.score([text]) for text in texts]))
    assert lm.score([]).shape == (0,)


def test_a_model_that_restarts_at_eos_scores_each_line_alone(lm: LanguageModel) -> None:
    restarting = LanguageModel(lm.hmm, lm.tokenizer, {"batches": {"kind": "stream", "eval_reset_at_eos": True}})
    one, two = lm.score(["the cat", "dog ran ."])
    torch.testing.assert_close(restarting.score(["the cat\ndog ran .", "the cat\n"]), torch.stack([one + two, one]))
    assert not torch.allclose(lm.score(["the cat\ndog ran ."]), one + two)
    for seed in range(5):
        continued = restarting.generate("the cat\ndog", max_new_tokens=8, seed=seed)
        assert continued == "the cat\n" + lm.generate("dog", max_new_tokens=8, seed=seed)
        assert restarting.generate("cat\n", max_new_tokens=8, seed=seed) == "cat\n" + lm.generate(
            max_new_tokens=8, seed=seed
        )


def test_an_impossible_text_scores_minus_infinity() -> None:
    emission = torch.full((1, len(WORDS)), 1 / 7, dtype=torch.float64)
    emission[0, 3] = 0
    one = torch.ones(1, dtype=torch.float64)
    lm = LanguageModel(HMM.from_probs(one, one[None], emission), WordTokenizer(WORDS))
    assert lm.score(["the cat"]).item() == -math.inf
    assert lm.perplexity(["the cat", "dog"]) == math.inf
    with pytest.raises(InputError, match="the prompt has probability zero under the model"):
        lm.generate("the cat")


def test_bad_texts_are_named(lm: LanguageModel) -> None:
    with pytest.raises(InputError, match=r"must be a list of strings: write \[text\]"):
        lm.score("the cat")
    with pytest.raises(InputError, match=r"texts\[1\] is a int"):
        lm.score(["the", 3])  # type: ignore[list-item]
    with pytest.raises(InputError, match="at least one text"):
        lm.perplexity([])


# --- generation -----------------------------------------------------------------------------------------------------


def from_scratch(lm: LanguageModel, prompt: list[int], count: int) -> list[int]:
    """Return the greedy continuation, with the whole prefix filtered again for every token."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(lm.hmm.next_token([tokens]).argmax()))
        if tokens[-1] == 1:
            return tokens[:-1]
    return tokens


@pytest.mark.parametrize("seed", range(8))
def test_temperature_zero_is_the_greedy_argmax(seed: int) -> None:
    lm = LanguageModel(random_hmm(seed=seed), WordTokenizer(WORDS))
    want = lm.tokenizer.decode(from_scratch(lm, [2, 3], 12))
    assert lm.generate("the cat", max_new_tokens=12, temperature=0) == want
    assert lm.generate("the cat", max_new_tokens=12, temperature=1e-4, seed=seed) == want


def expected_continuations(
    hmm: HMM, context: list[int], length: int, options: SamplingOptions, excluded: int | None
) -> dict[tuple[int, ...], float]:
    """Return the probability of every continuation of at most `length` tokens, until <eos>, by enumeration."""
    probs = hmm.next_token([context])[0].exp().double()
    if excluded is not None:
        probs[excluded] = 0
    if options.top_k is not None:
        probs[probs < probs.topk(options.top_k).values[-1]] = 0
    probs = probs ** (1 / options.temperature)
    found: dict[tuple[int, ...], float] = {}
    for token, p in enumerate((probs / probs.sum()).tolist()):
        rest = {(): 1.0}
        if token == 1:
            found[()] = p
            continue
        if length > 1:
            rest = expected_continuations(hmm, [*context, token], length - 1, options, excluded)
        for tokens, q in rest.items():
            found[(token, *tokens)] = p * q
    return found


@pytest.mark.parametrize("kind", ["dense", "blocked"])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 0.6, "proposals": 8},
        {"temperature": 0.7, "proposals": 2, "excluded": 0},
        {"temperature": 1.7},
        {"top_k": 3},
        {"top_k": 2, "temperature": 2.0},
        {"excluded": 0},
    ],
)
def test_batched_samples_follow_the_exact_probabilities(kind: str, how: dict) -> None:
    """With "proposals" as for models of many states; some rows run out of proposals."""
    hmm = random_hmm(seed=3) if kind == "dense" else blocked_hmm()
    excluded, proposals = how.get("excluded"), how.get("proposals")
    options = SamplingOptions(2, how.get("temperature", 1.0), how.get("top_k"), seed=0, num_samples=8000)
    expected = expected_continuations(hmm, [2, 3], 2, options, excluded)
    assert sum(expected.values()) == pytest.approx(1)
    counts = Counter(map(tuple, collect(sample_continuations(hmm, [2, 3], 1, options, excluded, None, proposals))))
    assert set(counts) <= {tokens for tokens, p in expected.items() if p > 0}
    for tokens, p in expected.items():
        assert abs(counts[tokens] / options.num_samples - p) < 5 * math.sqrt(p / options.num_samples) + 1e-3, tokens


@pytest.mark.parametrize("how", [{}, {"temperature": 0.7}, {"excluded": 0}])
def test_samples_restart_where_chunks_do(how: dict) -> None:
    hmm, options = random_hmm(seed=3), SamplingOptions(2, how.get("temperature", 1.0), seed=0, num_samples=8000)
    first = expected_continuations(hmm, [2, 3], 1, options, how.get("excluded"))
    second = hmm.emit(hmm.begin()).exp().double()
    if "excluded" in how:
        second[0] = 0
    second = second ** (1 / options.temperature)
    second /= second.sum()
    sampled = collect(sample_continuations(hmm, [2, 3], 1, options, how.get("excluded"), chunk=3))
    counts = Counter(tokens[1] if len(tokens) == 2 else 1 for tokens in sampled if tokens)
    assert sum(not tokens for tokens in sampled) / options.num_samples == pytest.approx(first[()], abs=0.03)
    for token, p in enumerate(second.tolist()):
        assert abs(counts[token] / sum(counts.values()) - p) < 5 * math.sqrt(p / options.num_samples) + 1e-3, token


@pytest.mark.parametrize("how", [{}, {"temperature": 0.5, "top_k": 4}, {"must": ["cat"], "max_new_tokens": 1}])
def test_top_p_keeps_the_fewest_most_likely_tokens_that_reach_it(lm: LanguageModel, how: dict) -> None:
    """Of the distribution given the constraint: one token that must be "cat" is."""
    options = {"max_new_tokens": 1, "num_samples": 3000, "seed": 0, **how}
    if "must" in how:
        options["max_new_tokens"] = 2
    probs = Counter(lm.generate("the", **options))
    drawn = Counter(lm.generate("the", top_p=0.6, **options))
    ranked, kept = [text for text, _ in probs.most_common()], len(drawn)
    assert set(drawn) == set(ranked[:kept])
    share = [sum(probs[text] for text in ranked[:n]) / 3000 for n in (kept - 1, kept)]
    assert share[0] < 0.62 and share[1] > 0.58
    for text in drawn:
        assert drawn[text] / 3000 == pytest.approx(probs[text] / 3000 / share[1], abs=0.06)
    with pytest.raises(InputError, match="top_p must be above 0 and at most 1, not 0"):
        lm.generate(top_p=0)


@pytest.mark.parametrize("how", [{}, {"top_p": 0.8}, {"must": ["cat"]}, {"allow_unk": False, "temperature": 0.7}])
def test_pieces_of_a_stream_add_up_to_the_text(lm: LanguageModel, how: dict) -> None:
    how = {"max_new_tokens": 12, "seed": 7, **how}
    pieces = list(lm.generate("the", stream=True, **how))
    assert pieces[0] == "the" and len(pieces) > 2 and "".join(pieces) == lm.generate("the", **how)
    for prompt, number in ((["the", "cat"], None), ("the", 3), (["the", "cat"], 3)):
        joined: dict[int, str] = {}
        for i, piece in lm.generate(prompt, num_samples=number, stream=True, **how):
            joined[i] = joined.get(i, "") + piece
        whole = lm.generate(prompt, num_samples=number, **how)
        flat = [text for texts in whole for text in texts] if isinstance(whole[0], list) else whole
        assert list(joined.values()) == flat
    with pytest.raises(InputError, match="the prompt is a NoneType, not a string"):
        lm.generate(None, stream=True)  # at the call, not at the first piece


def test_a_list_of_prompts(lm: LanguageModel) -> None:
    texts = lm.generate(["the", "cat", "the"], seed=5, max_new_tokens=8)
    assert texts == [lm.generate(each, seed=5 + j, max_new_tokens=8) for j, each in enumerate(["the", "cat", "the"])]
    several = lm.generate(("the", "cat"), seed=5, num_samples=2)
    assert several == [lm.generate("the", seed=5, num_samples=2), lm.generate("cat", seed=7, num_samples=2)]
    assert lm.generate([]) == []


def test_an_unknown_keyword_is_named_with_the_nearest(lm: LanguageModel) -> None:
    for call, near in ((lm.generate, "top_p"), (lm.guide, "json"), (lm.automaton, "words")):
        with pytest.raises(
            TypeError, match=rf"^{call.__name__}\(\) has no argument '{near}x'; did you mean '{near}'\?$"
        ):
            call(**{f"{near}x": 1})
    with pytest.raises(InputError, match=r"^generate\(\) has no argument 'beams'; it has prompt, max_new_tokens"):
        lm.generate(beams=3)


def test_the_next_token_is_that_of_scores_in_chunks() -> None:
    chunked = LanguageModel(
        random_hmm(seed=3), WordTokenizer(WORDS), {"batches": {"kind": "chunks", "batch_size": 1, "length": 3}}
    )
    for text in ("the cat", "the cat sat", "the cat sat ran", "the cat\nsat ran the"):
        for word, p in chunked.next_token(text, top=3):
            if word not in ("<eos>", "<unk>"):
                position = len(text.split()) + text.count("\n")
                assert chunked.token_scores([f"{text} {word}"])[0][position] == (
                    word,
                    pytest.approx(math.log(p), abs=1e-4),
                )


def test_samples_of_a_batch_are_those_of_single_calls(lm: LanguageModel) -> None:
    for how in ({}, {"temperature": 0.7}, {"allow_unk": False}, {"must": ["cat"], "never": ["dog"]}):
        alone = [lm.generate("the", max_new_tokens=12, seed=7 + i, **how) for i in range(9)]
        assert lm.generate("the", max_new_tokens=12, seed=7, num_samples=9, **how) == alone
        assert len(set(alone)) > 3
    options = [
        SamplingOptions(12, 0.7, seed=7, num_samples=9),
        *(SamplingOptions(12, 0.7, seed=7 + i) for i in range(9)),
    ]
    together, *alone = (collect(sample_continuations(lm.hmm, [2], 1, each, None, proposals=8)) for each in options)
    assert together == [tokens for (tokens,) in alone]
    with pieces.limit(2 * len(WORDS)):  # two samples at a time
        assert lm.generate("the", max_new_tokens=12, seed=7, num_samples=9) == [
            lm.generate("the", max_new_tokens=12, seed=7 + i) for i in range(9)
        ]
    assert len(lm.generate(max_new_tokens=3, num_samples=4)) == 4
    for seed in range(20):  # a sample does not depend on how long it may be, and may be of any length
        assert lm.generate("the", max_new_tokens=10**12, seed=seed).startswith(
            lm.generate("the", max_new_tokens=3, seed=seed)
        )
    with pytest.raises(InputError, match="num_samples must be at least 1, not 0"):
        lm.generate(num_samples=0)


def test_the_cumulative_sum_is_inverted_exactly() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(40, 1000, generator=generator) ** 4
    weights[:, 700:] = 0
    weights[5:10, :300] = 0
    uniform = torch.rand(40, dtype=torch.float64, generator=generator)
    uniform[[0, 6]], uniform[[1, 7]] = 0.0, 1 - 2**-53
    chosen = invert(weights.log(), uniform)
    sums = weights.double().cumsum(1)
    for row, index in enumerate(chosen.tolist()):
        assert weights[row, index] > 0
        share = uniform[row] * sums[row, -1]
        assert sums[row, index] - weights[row, index] - 1e-3 <= share <= sums[row, index] + 1e-3
    assert chosen[0] == 0 and chosen[6] == 300 and chosen[1] == chosen[7] == 699


def test_samples_without_a_prompt_follow_the_model(lm: LanguageModel) -> None:
    first = lm.hmm.log_start.exp() @ lm.hmm.emission.log_probs.exp()
    counts = torch.zeros(len(WORDS))
    for seed in range(600):
        text = lm.generate(max_new_tokens=1, seed=seed)
        counts[lm.tokenizer.encode(text)[0] if text else 1] += 1
    assert bool(((counts / 600 - first).abs() < 5 * (first / 600).sqrt() + 1e-3).all())


def test_a_seed_gives_the_same_text(lm: LanguageModel) -> None:
    texts = [lm.generate("the", max_new_tokens=20, seed=s) for s in (1, 1, 2, 3)]
    assert texts[0] == texts[1]
    assert len(set(texts)) > 1
    assert all(text.startswith("the") for text in texts)
    assert lm.generate("the unicorn", max_new_tokens=0) == "the unicorn"
    assert lm.generate("the unicorn", max_new_tokens=3, seed=0).startswith("the unicorn")
    assert lm.generate("the cat\n", max_new_tokens=3, seed=4).startswith("the cat\n")
    eos_only = torch.zeros(1, len(WORDS), dtype=torch.float64)
    eos_only[0, 1] = 1
    one = torch.ones(1, dtype=torch.float64)
    ends = LanguageModel(HMM.from_probs(one, one[None], eos_only), WordTokenizer(WORDS))
    assert ends.generate(seed=0) == ""


def test_top_k_samples_the_most_likely_tokens(lm: LanguageModel) -> None:
    most_likely = set(lm.hmm.next_token([[2]])[0].topk(2).indices.tolist())
    drawn = {lm.generate("the", max_new_tokens=1, top_k=2, seed=s).removeprefix("the").strip() for s in range(60)}
    assert {lm.tokenizer.encode(word)[0] if word else 1 for word in drawn} == most_likely
    assert lm.generate("the", top_k=1, seed=9) == lm.generate("the", temperature=0)
    assert lm.generate("the", top_k=10_000, seed=9) == lm.generate("the", seed=9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature must be a number of at least 0, not -1.0"),
        ({"temperature": math.nan}, "temperature must be"),
        ({"top_k": 0}, "top_k must be at least 1, not 0"),
        ({"max_new_tokens": -1}, "max_new_tokens must be at least 0"),
        ({"prompt": 3}, "prompt is a int"),
    ],
)
def test_bad_sampling_options_are_named(lm: LanguageModel, options: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        lm.generate(**options)


# --- control layout -------------------------------------------------------------------------------------------------


def test_control_layout_round_trip(tmp_path: Path) -> None:
    hmm = random_hmm(dtype=torch.float32)
    save_ctrlg(hmm, tmp_path, eos_token_id=1)
    tensors = load_file(tmp_path / "model.safetensors")
    torch.testing.assert_close(tensors["alpha_exp"].sum(1), torch.ones(5))
    assert tensors["beta"].shape == (5, len(WORDS))
    torch.testing.assert_close(tensors["gamma"].exp().sum(), torch.tensor(1.0))
    again, config = load_ctrlg(tmp_path)
    assert config == {"hidden_states": 5, "vocab_size": len(WORDS), "eos_token_id": 1}
    for before, after in zip(matrices(hmm), matrices(again), strict=True):
        torch.testing.assert_close(before, after)


def test_folders_of_control_libraries_are_models(lm: LanguageModel, tmp_path: Path) -> None:
    hmmlm.save_ctrlg(lm.hmm, tmp_path, lm.tokenizer.eos_id)
    with pytest.raises(InputError, match=r"no tokenizer in .*: it should contain tokenizer.json or tokenizer.model"):
        hmmlm.load(tmp_path)
    hmmlm.save_ctrlg(lm.hmm, tmp_path, lm.tokenizer.eos_id, lm.tokenizer)
    again = hmmlm.load(tmp_path)
    torch.testing.assert_close(again.score(["the cat"]), lm.score(["the cat"]))
    rewrite_json(tmp_path / "config.json", eos_token_id=0)
    with pytest.raises(InputError, match="eos_token_id is 0, but 1 in the tokenizer there"):
        hmmlm.load(tmp_path)


def test_control_layout_needs_the_end_token(lm: LanguageModel, tmp_path: Path) -> None:
    for tokenizer, message in ((None, "from 0 to"), (lm.tokenizer, "that of the tokenizer")):
        with pytest.raises(InputError, match=f"eos_token_id is 999: give .*{message}"):
            hmmlm.save_ctrlg(lm.hmm, tmp_path / "new", 999, tokenizer)
    assert not (tmp_path / "new").exists()


def test_control_layout_needs_the_tokenizer_of_the_model(lm: LanguageModel, tmp_path: Path) -> None:
    other = WordTokenizer(["<unk>", "<eos>", "a"])
    with pytest.raises(InputError, match="the tokenizer has 3 words and the model has"):
        hmmlm.save_ctrlg(lm.hmm, tmp_path / "new", other.eos_id, other)
    assert not (tmp_path / "new").exists()


def test_control_layout_errors(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="hidden_states is None, not an integer of at least 1"):
        load_ctrlg(saved)
    with pytest.raises(InputError, match=r"config.json: No such file"):
        load_ctrlg(tmp_path / "nothing")
    save_ctrlg(random_hmm(), tmp_path, 1)
    rewrite_json(tmp_path / "config.json", hidden_states=7)
    with pytest.raises(InputError, match=r"alpha_exp has shape \[5, 5\], config.json has \[7, 7\]"):
        load_ctrlg(tmp_path)
    rewrite_json(tmp_path / "config.json", hidden_states=5)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "alpha_exp": 2 * tensors["alpha_exp"]}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"model.safetensors: alpha_exp row 0 sums to 2, not to one"):
        load_ctrlg(tmp_path)


def test_a_prompt_that_ends_with_a_space_is_continued_without_another(lm: LanguageModel) -> None:
    for seed in range(20):
        plain = lm.generate("the cat", max_new_tokens=3, seed=seed)
        spaced = lm.generate("the cat ", max_new_tokens=3, seed=seed)
        assert spaced == "the cat " + plain.removeprefix("the cat").lstrip()


def test_unknown_words_can_be_excluded(lm: LanguageModel) -> None:
    expected = lm.hmm.next_token([[2]])[0].exp()
    expected[0] = 0
    expected, num = expected / expected.sum(), 500
    counts = torch.zeros(len(WORDS))
    for seed in range(num):
        text = lm.generate("the", max_new_tokens=1, seed=seed, allow_unk=False).removeprefix("the").strip()
        counts[lm.tokenizer.encode(text)[0] if text else 1] += 1
    assert counts[0] == 0
    assert bool(((counts / num - expected).abs() < 5 * (expected / num).sqrt() + 1e-3).all())
    one, unk_only = torch.ones(1), torch.eye(len(WORDS))[:1]
    lost = LanguageModel(HMM.from_probs(one, one[None], unk_only), WordTokenizer(WORDS))
    assert lost.generate(max_new_tokens=2) == "<unk> <unk>"
    with pytest.raises(InputError, match="only <unk> can follow here: allow unknown words"):
        lost.generate(allow_unk=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": 1.5}, "seed must be an integer, not 1.5"),
        ({"seed": 2**64}, "seed must be at most"),
        ({"num_samples": 10**9}, "num_samples must be at most 1,000,000, not 1000000000"),
        ({"temperature": "x"}, "temperature must be a number of at least 0, not 'x'"),
        ({"top_k": 1.5}, "top_k must be an integer, not 1.5"),
        ({"max_new_tokens": "3"}, "max_new_tokens must be an integer, not '3'"),
    ],
)
def test_sampling_options_of_the_wrong_type_are_named(lm: LanguageModel, options: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        lm.generate(**options)


def test_repr_shows_size_and_kind(lm: LanguageModel) -> None:
    assert repr(lm) == "LanguageModel(num_states=5, words=8, kind='dense × categorical')"
    assert repr(LanguageModel(blocked_hmm(), lm.tokenizer)).endswith("kind='factored × blocked')")


# --- infilling ------------------------------------------------------------------------------------------------------


def enumerated(lm: LanguageModel, text: str) -> list[dict[str, float]]:
    """Return the distribution of each blank, from the scores of the text with all choices of words."""
    words = [word for word in WORDS if word != "<eos>"]
    found: list[dict[str, float]] = [dict.fromkeys(words, 0.0) for _ in range(text.count("___"))]
    choices = list(itertools.product(words, repeat=len(found)))
    scores = lm.score([text.replace("___", "{}").format(*choice) for choice in choices])
    for choice, p in zip(choices, scores.softmax(0).tolist(), strict=True):
        for blank, word in zip(found, choice, strict=True):
            blank[word] += p
    return found


def blocked_hmm() -> HMM:
    """Return a model with two blocks of two states; the first emits <unk>, <eos>, cat and sat."""
    generator = torch.Generator().manual_seed(1)
    block = torch.tensor([0, 0, 1, 0, 1, 0, 1, 1])
    u, w, start = (torch.randn(s, generator=generator, dtype=torch.float64) for s in ((4, 3), (4, 3), (4,)))
    emission = torch.randn(8, 2, generator=generator, dtype=torch.float64)
    for m in (0, 1):
        emission[block == m] = emission[block == m].log_softmax(0)
    return HMM(start.log_softmax(0), Factored(u, w), Blocked(emission, block))


@pytest.mark.parametrize("kind", ["dense", "blocked"])
@pytest.mark.parametrize("restarts", [False, True])
def test_infilling_agrees_with_enumeration(kind: str, restarts: bool) -> None:
    config = {"batches": {"kind": "stream", "eval_reset_at_eos": restarts}}
    lm = LanguageModel(random_hmm() if kind == "dense" else blocked_hmm(), WordTokenizer(WORDS), config)
    for text in ("the ___ sat", "___", "the ___ ___\n___ ran .", "dog .\n___ unicorn"):
        got = lm.infill(text, top=100)
        want = enumerated(lm, text)
        assert len(got) == len(want)
        for blank, expected in zip(got, want, strict=True):
            assert dict(blank) == pytest.approx(expected, abs=1e-9)
            assert [p for _, p in blank] == sorted((p for _, p in blank), reverse=True)
    assert lm.infill("the ___ sat", top=2) == [lm.infill("the ___ sat")[0][:2]]


def test_blanks_of_a_subword_tokenizer_are_single_tokens() -> None:
    lines = ["the function returns a list", "the module returns a name, a list"] * 5
    tokenizer = HuggingFaceTokenizer.train(lines, 300)
    lm = LanguageModel(random_hmm(3, tokenizer.vocab_size), tokenizer)
    for text, words in (("the ___ returns", ["function", "list"]), ("a ___, a ___", ["name", "list"])):
        given = iter(words)
        filled = lm.encode(re.sub("___", lambda _: next(given), text))  # noqa: B023
        whole = [tokenizer.encode(" " + word) for word in words]
        assert all(len(tokens) == 1 for tokens in whole)  # each is one token
        assert [-1 if [token] in whole else token for token in filled] == [
            *encode_blanks(tokenizer, text),
            tokenizer.eos_id,
        ]
    (best,) = lm.infill("the ___ returns", top=3)
    assert len(best) == 3 and sum(p for _, p in best) < 1
    shown = dict(lm.infill("the ___ returns", top=tokenizer.vocab_size)[0])
    assert {"function", "…function", "list"} & set(shown) >= {"function", "list"}
    assert not any("▁" in word for word in shown if word != "▁")
    first = [word for word, _ in lm.infill("___ returns", top=tokenizer.vocab_size)[0]]
    assert not any(word.startswith("…") and len(word) > 1 for word in first)  # the start of a line continues no word


def test_texts_without_blanks_are_named(lm: LanguageModel) -> None:
    for text in ("the cat", "a___b", "the __ cat"):
        with pytest.raises(InputError, match="no blank: write ___"):
            lm.infill(text)
    with pytest.raises(InputError, match="top must be at least 1, not 0"):
        lm.infill("___", top=0)
    with pytest.raises(InputError, match="the text is a int"):
        lm.infill(3)  # type: ignore[arg-type]
    one = torch.ones(1)
    only_the = LanguageModel(HMM.from_probs(one, one[None], torch.eye(len(WORDS))[2:3]), WordTokenizer(WORDS))
    with pytest.raises(InputError, match="probability zero under the model, whatever its blanks are"):
        only_the.infill("the ___")


# --- wrong types, threads, memory ---


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda lm: lm.score(text for text in ["a"]), "not a generator: write list"),
        (lambda lm: lm.score({"a", "b"}), "not a set"),
        (lambda lm: lm.score(None), "not None"),
        (lambda lm: lm.score(b"a"), "not b'a'"),
        (lambda lm: lm.score([b"a"]), r"texts\[0\] is a bytes, not a string"),
        (lambda lm: lm.score(["a", "b\udcff"]), r"texts\[1\] has a lone surrogate, '\\udcff', at position 1"),
        (lambda lm: lm.perplexity(iter(["a"])), "not a list_iterator"),
        (lambda lm: lm.perplexity([]), "at least one text"),
        (lambda lm: lm.encode(5), "the text is a int, not a string"),
        (lambda lm: lm.generate("\udcff"), "the prompt has a lone surrogate"),
        (lambda lm: lm.infill("\udcff ___"), "the text has a lone surrogate"),
        (lambda lm: lm.guide(["a"], max_new_tokens="5"), "max_new_tokens must be an integer"),
        (lambda lm: lm.guide(["a"], max_new_tokens=1.5), "max_new_tokens must be an integer"),
        (lambda lm: load(5), "a model is a folder, not 5"),
        (lambda lm: lm.save(None), "a model is a folder, not None"),
        (lambda lm: lm.to("nowhere"), "unknown device 'nowhere'"),
    ],
)
def test_wrong_types_are_named(lm: LanguageModel, call: Callable[[LanguageModel], Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call(lm)


def test_a_guide_of_another_thread_is_never_returned(lm: LanguageModel) -> None:
    """Another thread may ask for another constraint between any two reads of the cache."""

    class Interleaved(GuideCache):
        reads = 0
        """Reads of the cache until the other thread asks."""

        @property
        def _guide(self) -> Any:
            cached, self.reads = self.cache, self.reads - 1
            if self.reads == 0:
                shared.guide([second], max_new_tokens=9)
            return cached

        @_guide.setter
        def _guide(self, value: Any) -> None:
            self.cache = value

    first, second = (lm.tokenizer.token(i) for i in (2, 3))
    shared = LanguageModel(lm.hmm, lm.tokenizer)
    shared._guides = guides = Interleaved(lm.hmm, lm.tokenizer)
    expected = lm.guide([first], max_new_tokens=9)[0].automaton.next
    for reads in range(1, 4):
        shared.guide([first], max_new_tokens=9)
        guides.reads = reads
        assert torch.equal(shared.guide([first], max_new_tokens=9)[0].automaton.next, expected)


def test_infilling_one_blank_holds_the_vocabulary_once() -> None:
    """Not once per position of the text: the largest tensor has fewer numbers than positions × words."""

    class Largest(TorchDispatchMode):
        numbers = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                self.numbers = max(self.numbers, result.numel())
            return result

    words = ["<unk>", "<eos>", *map(str, range(398))]
    generator = torch.Generator().manual_seed(0)
    sizes = ((2,), (2, 2), (2, len(words)))
    lm = LanguageModel(
        HMM(*(torch.randn(*size, generator=generator).log_softmax(-1) for size in sizes)), WordTokenizer(words)
    )
    with Largest() as largest:
        lm.infill("1 " * 300 + "___" + " 2" * 300)
    assert largest.numbers < 600 * len(words) / 10
