"""Compare settings of a distillation on the same samples of a language model.

    python -m benchmarks.distill_quality MODEL FOLDER --tokens 10000000 --states 1024 4096

Samples MODEL once (FOLDER/samples; an interrupted run continues), then trains one HMM per number of states and per
--set, a JSON object of sections of the run configuration: --set '{"optimizer": {"step": 0.3}}'. Prints, for each, the
seconds of training and the perplexity of held-out samples by position, beside a 5-gram's and the model's own.
"""

import argparse
import json
import time
from pathlib import Path

from hmmlm.config.distill import DistillConfig
from hmmlm.config.recipe import merge
from hmmlm.config.run import RunConfig
from hmmlm.config.training import drop_other_kinds, read_config
from hmmlm.data.tokenizers import load_tokenizer
from hmmlm.device import pick_device
from hmmlm.report.distill import evaluate_distillation, print_distillation
from hmmlm.runs.progress import terminal_progress
from hmmlm.training.distill import SAMPLES, distill, resume_distillation, run_config
from hmmlm.training.train import train


def main() -> None:
    """Sample, then train and evaluate every setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--length", type=int)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--states", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--set", action="append", default=[], metavar="JSON")
    options = parser.parse_args()
    given = {"tokens": options.tokens, "length": options.length, "epochs": options.epochs}
    base, progress = options.folder / "base", terminal_progress()
    config = DistillConfig(model=options.model, num_states=options.states[0], **given)
    began = time.perf_counter()
    result = resume_distillation(base, progress) if base.exists() else distill(config, base, progress)
    print(f"sampled and trained {base} in {time.perf_counter() - began:.0f} s, {result.seconds:.0f} s of them training")
    print_distillation(evaluate_distillation(base))
    saved = json.loads((base / SAMPLES / "distill.json").read_text())
    saved.pop("shard_texts")
    vocab_size = load_tokenizer(base / SAMPLES / "tokenizer").vocab_size
    for states in options.states:
        for number, text in enumerate(["{}", *options.set]):
            if (states, text) == (options.states[0], "{}"):
                continue  # the base
            changed = DistillConfig(**{**saved, "num_states": states}).resolve(pick_device("auto").type)
            values = run_config(changed, base / SAMPLES, vocab_size).dump()
            values = merge(drop_other_kinds(RunConfig, values, json.loads(text)), json.loads(text))
            out = options.folder / f"states-{states}-{number}"
            result = train(read_config(RunConfig, values), out, progress=progress)
            print(f"{states} states, {text}: {result.seconds:.0f} s of training")
            print_distillation(evaluate_distillation(out, base / SAMPLES))


if __name__ == "__main__":
    main()
