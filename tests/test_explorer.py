"""The endpoints of the explorer: what the panels show, against the queries of the model."""

import math
import re
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import fields
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from helpers.commands import failure
from helpers.explorer_models import HOSTILE, blocked_model, train_run
from helpers.report_models import sentence_model

import hmmlm
from hmmlm.cli.main import main
from hmmlm.constrain.constraint import Constraint
from hmmlm.data.words import WordTokenizer
from hmmlm.emissions import Categorical
from hmmlm.errors import InputError
from hmmlm.explorer.endpoints import ENDPOINTS, answer
from hmmlm.explorer.explorer import Explorer
from hmmlm.explorer.generation import GenerateQuery, chosen_constraints, constraint_kinds
from hmmlm.explorer.index import StateIndex
from hmmlm.explorer.layout import embed
from hmmlm.hmm import HMM
from hmmlm.lm.lm import LanguageModel
from hmmlm.report.explain import explain_states
from hmmlm.scan.likelihood import joint_scan
from hmmlm.transitions import LowRank

ROOT = Path(__file__).parent.parent
TEXT = "the cat sees the dog ."


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_run(tmp_path_factory.mktemp("explorer"))


@pytest.fixture(scope="module")
def explorer(run: Path) -> Explorer:
    return ready(Explorer(hmmlm.load(run), run))


@pytest.fixture(scope="module")
def blocked() -> Iterator[Explorer]:
    explorer = Explorer(blocked_model())
    yield explorer
    explorer.close()


def ready(explorer: Explorer) -> Explorer:
    """Wait for what is computed in the background."""
    futures: list[Future[Any]] = [explorer.layout, explorer.second]
    for future in futures:
        future.exception(timeout=120)
    return explorer


def test_a_sentence_agrees_with_the_queries(explorer: Explorer) -> None:
    lm = explorer.lm
    found = answer(explorer, "sentence", {"text": TEXT})
    posterior = lm.hmm.posterior([lm.encode(TEXT)])[0]
    for i, (token, (text, log_prob)) in enumerate(zip(found["tokens"], lm.token_scores([TEXT])[0], strict=True)):
        assert token["text"] == text
        assert token["surprisal"] == pytest.approx(-log_prob / math.log(2))
        best = posterior[i].topk(5)
        assert [state for state, _ in token["states"]] == best.indices.tolist()
        assert [p for _, p in token["states"]] == pytest.approx(best.values.tolist())
        assert token["entropy"] == pytest.approx(float(torch.special.entr(posterior[i]).sum()) / math.log(2), abs=1e-5)
        assert TEXT[token["start"] : token["stop"]] == ("" if token["end"] else text)
    assert [token["viterbi"] for token in found["tokens"]] == [state for _, state, _ in lm.states([TEXT])[0]]
    assert found["perplexity"] == pytest.approx(lm.perplexity([TEXT]))
    assert not found["omitted"] and found["problem"] is None


def test_alternatives_are_exact_given_both_sides(explorer: Explorer) -> None:
    lm = explorer.lm
    for position, blank in ((1, "the ___ sees the dog ."), (3, "the cat sees ___ dog .")):
        found = answer(explorer, "blank", {"text": TEXT, "position": position})
        expected = lm.infill(blank, top=12)[0]
        assert [word["text"] for word in found["words"]] == [word for word, _ in expected]
        assert [word["p"] for word in found["words"]] == pytest.approx([p for _, p in expected], rel=1e-4)
    end = answer(explorer, "blank", {"text": TEXT, "position": 6})
    assert end["words"][0]["text"] == "<eos>" and end["token"]["rank"] == 1


@pytest.mark.parametrize("kind", ["dense", "blocked"])
def test_infill_at_is_a_row_of_infill(kind: str) -> None:
    lm = sentence_model() if kind == "dense" else blocked_model(256)
    tokens = [lm.encode("the cat runs" if kind == "dense" else "the cat word3 word9")]
    whole = lm.hmm.infill(tokens)[0]
    for position, row in enumerate(whole):
        torch.testing.assert_close(lm.hmm.infill_at(tokens, position).exp(), row.exp(), rtol=1e-5, atol=1e-7)
    with pytest.raises(InputError, match="position must be at most"):
        lm.hmm.infill_at(tokens, 9)


def test_an_impossible_text_has_no_states() -> None:
    found = answer(Explorer(sentence_model()), "sentence", {"text": "cat the"})
    assert found["bits"] is None and "impossible" in found["problem"]
    assert found["tokens"][0]["surprisal"] is None and "states" not in found["tokens"][0]


def test_lines_and_unknown_words_keep_their_place(explorer: Explorer) -> None:
    text = "  the zebra sees \n the dog"
    tokens = answer(explorer, "sentence", {"text": text})["tokens"]
    shown = [(text[token["start"] : token["stop"]], token["unknown"], token["end"]) for token in tokens]
    words = [(word, word == "zebra", False) for word in ("the", "zebra", "sees")]
    end = ("", False, True)
    assert shown == [*words, end, ("the", False, False), ("dog", False, False), end]


@pytest.mark.parametrize(
    "text",
    [
        HOSTILE,
        pytest.param("a " * 5000, marks=pytest.mark.slow),
        "😀" * 10_000,
        "\n" * 10_000,
        "",
        "\u202e\u2066 \x00\x1b[31m",
    ],
)
def test_any_text_is_answered(explorer: Explorer, blocked: Explorer, text: str) -> None:
    for each in (explorer, blocked):
        found = answer(each, "sentence", {"text": text})
        assert len(found["tokens"]) + found["omitted"] == len(each.lm.encode(text))
    assert answer(explorer, "compare", {"text": text})["ready"]


def test_states_agree_with_the_explanation(explorer: Explorer) -> None:
    lm, summary = explorer.lm, explain_states(explorer.lm, 16)
    state = int(summary.order[0])
    page = answer(explorer, "state", {"state": state})
    assert page["share"] == pytest.approx(float(summary.mass[state]), rel=1e-4) and page["rank"] == 1
    told = [lm.tokenizer.token(word) for word in summary.words[state].tolist() if word >= 0]
    assert [word["text"] for word in page["words"]] == told
    after = summary.transition[state].topk(8)
    assert [other["state"] for other in page["after"]] == after.indices.tolist()
    assert [other["p"] for other in page["after"]] == pytest.approx(after.values.tolist(), rel=1e-3)
    flow = summary.mass * summary.transition[:, state]
    before = (flow / flow.sum()).topk(8)
    assert [other["p"] for other in page["before"]] == pytest.approx(before.values.tolist(), rel=1e-3)
    following = summary.transition[state] @ lm.hmm.dense().emission.log_probs.double().exp()
    assert page["says_next"][0]["p"] == pytest.approx(float(following.max()), rel=1e-3)


def test_search_finds_the_states_of_a_word(explorer: Explorer) -> None:
    token = explorer.lm.token_id("cat")
    found = answer(explorer, "search", {"word": "cat"})
    expected = explorer.lm.embeddings()[token]
    assert found["states"][0]["state"] == int(expected.argmax())
    assert sum(state["p"] for state in found["states"]) == pytest.approx(1, abs=1e-4)
    unknown = answer(explorer, "search", {"word": "do"})
    assert "not a word" in unknown["problem"] and unknown["suggestions"] == ["dog"]


def test_passages_are_where_the_posterior_is_high(explorer: Explorer) -> None:
    state = int(explorer.index.order[0])
    found = answer(explorer, "passages", {"state": state})["passages"]
    probs = [passage["p"] for passage in found]
    assert len(found) == 6 and probs == sorted(probs, reverse=True) and probs[0] > 0.5
    told = [word["text"] for word in answer(explorer, "state", {"state": state})["words"]]
    assert found[0]["word"] in told
    assert answer(Explorer(sentence_model()), "passages", {"state": 0})["problem"]


def test_the_map_has_all_states_of_a_small_model(explorer: Explorer) -> None:
    found = answer(explorer, "map", {})
    assert found["ready"] and found["exact"] and len(found["states"]) == explorer.lm.hmm.num_states == 12
    shares = [share for _, _, _, share, _ in found["states"]]
    assert shares == sorted(shares, reverse=True) and sum(shares) == pytest.approx(1, abs=1e-3)
    assert all(0 <= x <= 1 and 0 <= y <= 1 for _, x, y, _, _ in found["states"])


def test_neighbours_are_near_on_the_map() -> None:
    generator = torch.Generator().manual_seed(0)
    centres = 4 * torch.randn(6, 16, generator=generator)
    vectors = centres.repeat_interleave(20, 0) + 0.3 * torch.randn(120, 16, generator=generator)
    points = embed(vectors, Event())
    distances = torch.cdist(points, points).fill_diagonal_(torch.inf)
    nearest = distances.topk(5, largest=False).indices // 20
    same = nearest == torch.arange(120)[:, None] // 20
    assert same.float().mean() > 0.95
    assert torch.equal(points, embed(vectors, Event()))  # the same every time
    for count in (1, 2, 7):
        assert embed(vectors[:count], Event()).isfinite().all()


def test_the_estimated_share_approximates_the_exact_one() -> None:
    lm = blocked_model(256)
    exact, estimated = StateIndex(lm), StateIndex(lm, exact_states=10)
    assert exact.exact and not estimated.exact
    assert float((exact.share - estimated.share).abs().sum()) < 0.15


def test_large_models_never_build_a_matrix(blocked: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("dense")

    monkeypatch.setattr(type(blocked.lm.hmm), "dense", refuse)
    text = "the cat word3 word9"
    for name, asked in {
        "sentence": {"text": text},
        "blank": {"text": text, "position": 2},
        "search": {"word": "cat"},
        "state": {"state": 4095},
        "generate": {"seed": 1},
        "fill": {"text": "the ___ word3"},
        "model": {},
        "run": {},
    }.items():
        assert answer(blocked, name, asked), name


def test_a_union_of_models_has_all_panels() -> None:
    lm = blocked_model(128)
    union = LanguageModel(HMM.union([lm.hmm, blocked_model(64).hmm.dense()], [0.6, 0.4]), lm.tokenizer)
    explorer = ready(Explorer(union))
    found = answer(explorer, "sentence", {"text": "the cat word3"})
    assert found["bits"] == pytest.approx(-float(union.score(["the cat word3"])[0]) / math.log(2), rel=1e-5)
    assert len(answer(explorer, "map", {})["states"]) == 192
    page = answer(explorer, "state", {"state": 150})
    assert all(128 <= other["state"] < 192 for other in page["after"] + page["before"])
    for name, asked in {
        "blank": {"text": "the cat", "position": 1},
        "search": {"word": "cat"},
        "generate": {},
    }.items():
        assert answer(explorer, name, asked)


def test_samples_are_those_of_the_model(explorer: Explorer) -> None:
    lm = explorer.lm
    found = answer(explorer, "generate", {"prompt": "the", "seed": 5, "num_samples": 2, "max_new_tokens": 8})
    expected = lm.generate("the", seed=5, num_samples=2, max_new_tokens=8)
    assert [sample["text"] for sample in found["samples"]] == expected
    for sample in found["samples"]:
        assert [token["new"] for token in sample["tokens"]][:2] == [False, True]
        tokens, path = ([token[name] for token in sample["tokens"]] for name in ("id", "state"))
        joint = joint_scan(lm.hmm, torch.tensor([tokens]), torch.tensor([path]))
        assert joint.log_likelihood.isfinite().all()
    assert found["log_prob_accept"] is None and answer(explorer, "generate", {})["seed"] >= 0


def test_constraints_are_followed_token_by_token(explorer: Explorer) -> None:
    fields = {"seed": 1, "constraints": {"must": ["fish", ["cat", "bird"]], "never": ["dog"]}, "allow_unk": False}
    found = answer(explorer, "generate", fields | {"max_new_tokens": 12})
    guide, position = explorer.lm.guide(["fish", ("cat", "bird")], ["dog"], 12, allow_unk=False)
    assert found["log_prob_accept"] == pytest.approx(guide.log_prob_accept(position), rel=1e-4)
    for sample in found["samples"]:
        assert "fish" in sample["text"] and "dog" not in sample["text"]
        here = position
        for token in sample["tokens"]:
            here = guide.advance(here, token["id"])
            assert token["log_prob_accept"] == pytest.approx(guide.log_prob_accept(here), abs=1e-3)


def test_every_constraint_of_the_model_is_offered(explorer: Explorer) -> None:
    kinds = constraint_kinds()
    assert kinds["must"] == kinds["never"] == "list" and kinds["regex"] == "text" and kinds["words"] == "bounds"
    assert set(kinds) == {field.name for field in fields(Constraint)} - {"automaton"}  # which is not JSON
    constraints = {"regex": "[a-z ]+", "words": [3, 4], "must": ["ca"], "match": "prefix"}
    found = answer(explorer, "generate", {"seed": 1, "constraints": constraints})
    for sample in found["samples"]:
        assert re.fullmatch(r"([a-z]+ ){2,3}[a-z]+", sample["text"]) and "ca" in sample["text"]
        assert sample["tokens"][-1]["log_prob_accept"] == pytest.approx(0, abs=1e-3)


def test_blanks_are_filled(explorer: Explorer) -> None:
    found = answer(explorer, "fill", {"text": "the ___ sees the ___ .", "top": 3})
    expected = explorer.lm.infill("the ___ sees the ___ .", top=3)
    assert [[(word["text"], word["p"]) for word in blank] for blank in found["blanks"]] == expected


def test_the_second_model_is_an_n_gram_by_default(explorer: Explorer, run: Path) -> None:
    found = answer(explorer, "compare", {"text": TEXT})
    own, other = found["models"]
    assert found["aligned"] and other["name"] == "Kneser-Ney 5-gram"
    assert own["bits"] == pytest.approx(-float(explorer.lm.score([TEXT])[0]) / math.log(2), rel=1e-5)
    assert other["bits"] == pytest.approx(sum(token["surprisal"] for token in other["tokens"]))
    both = ready(Explorer(explorer.lm, run, blocked_model(64)))
    found = answer(both, "compare", {"text": "the cat"})
    assert not found["aligned"] and found["models"][1]["name"] == "second model"
    alone = ready(Explorer(sentence_model()))
    with pytest.raises(InputError, match="no second model"):
        answer(alone, "compare", {"text": "the cat"})


def test_the_run_has_curves_settings_and_files(explorer: Explorer) -> None:
    found = answer(explorer, "run", {})
    assert len(found["curves"]["valid"]) == 3 and found["curves"]["train"] and found["curves"]["rate"]
    assert ["model.num_states", "12"] in found["changed"] and found["defaults"]
    assert "config.json" in [file["path"] for file in found["files"]]
    assert not found["problems"] and found["results"]["model"]["test"]["perplexity"] > 1
    alone = answer(Explorer(sentence_model()), "run", {})
    assert alone["problems"] and alone["curves"] == {}


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("nothing", {}, "no endpoint 'nothing'"),
        ("sentence", {}, "text: Field required"),
        ("sentence", {"text": "a" * 10_001}, "at most 10000 characters"),
        ("sentence", {"text": "a", "more": 1}, "more: Extra inputs"),
        ("sentence", {"text": "\ud800"}, "text"),
        ("sentence", {"text": 5}, "valid string"),
        ("blank", {"text": "the cat", "position": 99}, "position 99 is beyond the text of 3 tokens"),
        ("blank", {"text": "the cat", "position": -1}, "position"),
        ("state", {"state": 12}, "there is no state 12: the model has states 0 to 11"),
        ("search", {"word": ""}, "word"),
        ("generate", {"num_samples": 100}, "num_samples"),
        ("generate", {"max_new_tokens": 10**9}, "max_new_tokens"),
        ("generate", {"temperature": math.nan}, "temperature"),
        ("generate", {"constraints": {"prompt": "x"}}, "no constraint 'prompt'"),
        ("generate", {"constraints": {"must": "the"}}, "must: give a list"),
        ("generate", {"constraints": {"regex": 5}}, "regex: give a string"),
        ("generate", {"constraints": {"words": "many"}}, "words"),
        ("generate", {"constraints": {"automaton": [1]}}, "no constraint 'automaton'"),
        ("generate", {"constraints": {"must": ["x" * 5000]}}, "more than 4,000 characters"),
        ("generate", {"constraints": {"must": ["the"], "never": ["the"]}}, "contradict"),
        ("fill", {"text": "no blank"}, "no blank"),
    ],
)
def test_bad_requests_are_refused(explorer: Explorer, name: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        answer(explorer, name, fields)


def test_samples_that_take_too_long_are_refused(blocked: Explorer) -> None:
    size = {"num_samples": 8, "max_new_tokens": 200}
    assert answer(blocked, "generate", size)["samples"]
    for slow in ({"allow_unk": False}, {"temperature": 0.5}, {"top_k": 2}):
        with pytest.raises(InputError, match="take too long here"):
            answer(blocked, "generate", size | slow)


def test_a_constraint_that_takes_too_long_is_refused() -> None:
    states, words = 8192, ["<unk>", "<eos>", "cat"]
    transition = LowRank(torch.zeros(states, 1), torch.full((1, states), -math.log(states)))
    emission = Categorical(torch.full((states, len(words)), -math.log(len(words))))
    lm = LanguageModel(HMM(torch.full((states,), -math.log(states)), transition, emission), WordTokenizer(words))
    constraints = {"must": ["cat"]}
    assert chosen_constraints(lm, GenerateQuery(max_new_tokens=100, constraints=constraints)) == constraints
    with pytest.raises(InputError, match="takes too long here"):
        chosen_constraints(lm, GenerateQuery(max_new_tokens=200, constraints=constraints))


@pytest.mark.parametrize("page", ["docs/guide/explore.md"])
def test_every_endpoint_and_field_is_documented(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for name, endpoint in ENDPOINTS.items():
        (line,) = re.findall(rf"^\| `{name}` \|.*$", text, re.MULTILINE)
        assert all(f"`{field}`" in line for field in endpoint.query.model_fields), name


@pytest.mark.slow
def test_subwords_are_shown_as_they_continue(tmp_path: Path) -> None:
    run = train_run(tmp_path, "--tokenizer.kind", "bpe", "--tokenizer.vocab-size", "270")
    explorer = Explorer(hmmlm.load(run), run)
    text = "the bird 😀"
    tokens = answer(explorer, "sentence", {"text": text})["tokens"]
    assert tokens[0]["text"][0] == "t" and not tokens[0]["continues"]
    assert any(token["continues"] for token in tokens)
    assert "".join(text[token["start"] : token["stop"]] for token in tokens[:-1]).startswith("thebird")
    words = answer(explorer, "blank", {"text": text, "position": 1})["words"]
    assert any(word["continues"] for word in words)


def test_bad_commands(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is a folder: give the name of a file" in failure(capsys, "explore", str(run), "--export", str(tmp_path))
    assert "no model at" in failure(capsys, "explore", str(tmp_path / "none"))
    assert "no model at" in failure(capsys, "explore", str(run), str(tmp_path / "none"))
    assert "--port" in failure(capsys, "explore", str(run), "--port", "70000")


def test_the_command_exports_a_page(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert main(["explore", str(run), "--export", str(page), "--text", "the </script><b>cat</b> \ufeff"]) == 0
    assert capsys.readouterr().out.strip() == str(page)
    content = page.read_text(encoding="utf-8")
    assert content.count("</script>") == content.count("<script") == 10  # the text does not end the data
    assert "http://" not in content.replace("http://www.w3.org/2000/svg", "") and "https://" not in content
    assert "Content-Security-Policy" in content and 'src="' not in content
