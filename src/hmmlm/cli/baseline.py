"""`hmmlm baseline`: train a neural language model to compare a hidden Markov model with."""

from __future__ import annotations

from pathlib import Path

from hmmlm.config.recipe import recipe_names

OVERVIEW = f"""usage: hmmlm baseline [OPTIONS]

Train an LSTM or another neural language model on the text of a hidden Markov model, to
compare the two. It is scored like the HMM, on every token, <eos> and <unk> included.
(n-grams need no training: every report of `hmmlm train` has them.) 1 MB of text takes about
five minutes on two CPU cores; progress shows the time left.

Give both the same token files, through --data of the run or of `hmmlm data`.

most used options:
  --data NAME_OR_PATH       as in `hmmlm train`
  --out FOLDER              folder of the run (default: baselines/NAME-TIME)
  --resume FOLDER           resume a run (Ctrl-C saves and stops)
  --recipe NAME             one of {", ".join(recipe_names("baseline"))}
  --config FILE.toml        start from a recipe of your own (with command = "baseline")
  --model.kind KIND         lstm (default), awd-lstm, feedforward, relaxed-hmm
  --model.hidden N          size of word embeddings and layers
  --model.layers N          layers
  --train.epochs N          passes over the text

All settings, by section: hmmlm baseline --help SECTION
  SECTION is text, tokenizer, batches, model, optimizer, schedule, train, or all

examples:
  hmmlm baseline --data runs/mine --out baselines/lstm
  hmmlm baseline --data tokens --model.kind feedforward --batches.batch-size 128
  hmmlm baseline --recipe ptb-awd-lstm --data runs/ptb
  hmmlm baseline --resume baselines/lstm
"""


def run(argv: list[str]) -> int:
    from hmmlm.cli.launch import launch
    from hmmlm.cli.main import INTERRUPTED
    from hmmlm.cli.parse import parse
    from hmmlm.cli.training import BaselineArguments, config_of, run_training
    from hmmlm.config.networks import BaselineConfig

    arguments = parse(BaselineArguments, argv, "baseline", OVERVIEW, defaults=BaselineConfig())
    if (code := launch("baseline", argv, arguments.train)) is not None:
        return code

    from hmmlm.cli.models import warn_unknown
    from hmmlm.data.files import PERPLEXITY, read_json
    from hmmlm.data.tokenfile import unknown_fraction
    from hmmlm.runs.progress import perplexity_text
    from hmmlm.training.networks import train_baseline
    from hmmlm.training.prepare import reopen

    config = config_of(BaselineConfig, arguments)
    name = arguments.recipe or Path(arguments.config or arguments.data).stem
    result, reports = run_training("baseline", config, arguments, name, train_baseline)
    if not (result.finished and reports):
        return 0 if result.finished else INTERRUPTED
    scores = {split: perplexity_text(value) for split, value in read_json(result.out / PERPLEXITY).items()}
    data = reopen(result.out)
    unknown = unknown_fraction(data.tokens["test"], data.tokenizer.unk_id, data.tokenizer.eos_id)
    print(f"perplexity: valid {scores['valid']}, test {scores['test']} ({unknown:.1%} of the words are unknown)")
    warn_unknown({"the test text": unknown}, config.data)
    return 0
