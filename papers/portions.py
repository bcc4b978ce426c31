"""Write parts of the training text of PTB, for the study `beyond`.

    python -m papers.portions        # every fourth and every sixteenth line, into tokens/

Validation and test texts and the vocabulary are those of the whole, so that perplexities can be compared.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hmmlm.config.run import RunConfig
from hmmlm.data.tokenfile import TokenFile, write_tokens
from hmmlm.runs.folders import refuse_used
from hmmlm.runs.progress import LineProgress
from hmmlm.training.prepare import find_data, prepare
from papers.beyond import BEYOND, PORTIONS, portion
from papers.settings import configuration


def shorten(config: RunConfig, parts: int, out: Path) -> TokenFile:
    """Write the token files of a run's text into a new folder, with one of `parts` lines of the training text."""
    refuse_used(out)
    train = prepare(config, find_data(config), out, LineProgress()).tokens["train"]
    lines = np.split(train.tokens, train.documents[1:-1])[::parts]
    return write_tokens(out / "data" / "train", lines, train.vocab_size, train.fingerprint, train.source)


def main() -> None:
    config = configuration(BEYOND.runs[0])
    assert isinstance(config, RunConfig)
    for parts in PORTIONS:
        print(f"{portion(parts)}: {len(shorten(config, parts, Path(portion(parts)))):,} training tokens")


if __name__ == "__main__":
    main()
