"""Distillation of a language model into an HMM: sample it, train on the samples from its hidden states.

The folder is an ordinary run from the start: config.json is written first, samples/ has the texts, and training
resumes as that of any run.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import ValidationError

from hmmlm.config.distill import DistillConfig
from hmmlm.config.explain import explain
from hmmlm.config.initialization import CountsConfig
from hmmlm.config.run import RunConfig
from hmmlm.config.training import read_config
from hmmlm.data.batches import Batch
from hmmlm.data.files import read_json, write_bytes
from hmmlm.device import device_name, pick_device, total_memory
from hmmlm.distillation.kmeans import nearest
from hmmlm.distillation.samples import (
    HOLD_OUT,
    HOLD_OUT_EVERY,
    SETTINGS,
    SampleFolder,
    SamplePlan,
    fitting_length,
    read_prompts,
)
from hmmlm.errors import InputError
from hmmlm.runs.folders import lock_run, new_run, refuse_used, saved_config
from hmmlm.runs.interrupt import Stopped, stop_on_signals
from hmmlm.runs.progress import Progress
from hmmlm.teachers.sampling import TextSampler, open_sampler
from hmmlm.terminal import time_text
from hmmlm.training.prepare import Prepared, check_memory
from hmmlm.training.train import make_learner, train
from hmmlm.training.trainer import TrainResult, make_fabric

MIN_TOKENS = 2_000
"""Of a distillation that --minutes chooses."""

SAMPLES = "samples"
"""Folder of a run with the texts that it was distilled from."""
MAX_TEXTS = {"cpu": 128, "cuda": 1_024}
"""Texts that are sampled at once; fewer, if their key-value caches take more than a third of the memory."""

STREAMS, WINDOW = 64, 128
"""Texts that training reads side by side, and tokens of each that the teacher or an update reads at once."""
SMOOTHING = 0.01
"""Pseudocounts in relation to the tokens counted. 1% and 3% differ little: 256 states trained on 91,000 tokens of
stories15M have a validation perplexity of 73.3 and 72.5."""
CLUSTERED = 256
"""Tokens per state whose hidden states are clustered."""
TOKENS_PER_STATE = 800
"""Sampled tokens per state where --minutes chooses both."""
MEASURED_TEXTS, MEASURED_LENGTH = 32, 8
"""Texts that are sampled, and the tokens of each, to measure the speed."""


class Speeds(NamedTuple):
    """Seconds per token, measured on a few: of clustering per state and pass, of training per state and epoch."""

    sampling: float
    embedding: float
    clustering: float
    training: float

    def plan(self, config: DistillConfig, run: RunConfig) -> dict[str, float]:
        """Return the seconds of each phase of a resolved distillation."""
        assert config.tokens and config.num_states and config.epochs and isinstance(run.initialization, CountsConfig)
        trained, kmeans = config.tokens * (1 - len(HOLD_OUT) / HOLD_OUT_EVERY), run.initialization.kmeans
        clustered, epoch = min(kmeans.tokens, trained), trained * self.training * config.num_states
        return {
            "sampling": config.tokens * self.sampling,
            "embedding": (clustered + trained) * self.embedding,
            "clustering": clustered * (kmeans.passes + 1) * self.clustering * config.num_states,
            "training": config.epochs * epoch,
            "evaluation": epoch / 4,  # likelihoods without counts, of a tenth of the text, and n-grams
        }


def distill(config: DistillConfig, out: Path, progress: Progress | None = None) -> TrainResult:
    """Distill a language model into a run in the new folder `out`.

    Ctrl-C or SIGTERM saves and returns a result that is not `finished`; `resume_distillation` continues.
    """
    progress = progress or Progress()
    refuse_used(out)
    device = pick_device(config.device)
    given, config = config, config.resolve(device.type)
    sampler = open_sampler(config.model, gguf_file=config.gguf_file, device=device)
    prompts = [] if config.prompts is None else read_prompts(config.prompts)
    config = config.model_copy(update={"length": fitting_length(sampler, prompts or [""], config.length)})
    words = sampler.vocab_size

    def check(config: DistillConfig) -> RunConfig:
        _check_amount(config)
        run = run_config(config, out / SAMPLES, words)
        check_memory(run.model.size(words), run.optimizer.kind, device)
        return run

    if config.minutes is None:
        check(config)
    config, seconds = _plan(config, given, sampler, prompts or [""])
    run = check(config)
    phases = ", ".join(f"{name} {time_text(each)}" for name, each in seconds.items())
    progress.note(
        f"plan: {config.tokens:,} tokens, {config.num_states:,} states; {phases}: about "
        f"{time_text(sum(seconds.values()))} in all (--minutes M chooses tokens and states to fit)"
    )
    plan = {"shard_texts": _texts_at_once(sampler, config, device)}
    with lock_run(out):
        with new_run(out, (json.dumps(run.dump(), indent=1) + "\n").encode()):
            folder = SampleFolder(out / SAMPLES)
            if prompts:
                write_bytes(folder.prompts, ("\n".join(prompts) + "\n").encode())
            settings = {**config.model_dump(mode="json"), **plan}
            write_bytes(folder.path / SETTINGS, (json.dumps(settings, indent=1) + "\n").encode())
        finished = _sample(config, plan["shard_texts"], folder, sampler, progress)
    del sampler
    return _train(out, finished, progress)


def resume_distillation(out: Path, progress: Progress | None = None) -> TrainResult:
    """Continue an interrupted distillation in `out`, from where it stopped: sampling or training."""
    progress = progress or Progress()
    folder = SampleFolder(out / SAMPLES)
    config, texts = _saved_settings(out)
    finished = True
    with lock_run(out):
        if not folder.complete:
            device = pick_device(config.device)
            sampler = open_sampler(config.model, gguf_file=config.gguf_file, device=device)
            finished = _sample(config, texts, folder, sampler, progress)
            del sampler
    return _train(out, finished, progress)


def _sample(
    config: DistillConfig, shard_texts: int, folder: SampleFolder, sampler: TextSampler, progress: Progress
) -> bool:
    """Sample until the folder is complete (True), or until asked to stop (False)."""
    assert config.tokens is not None and config.length is not None
    plan = SamplePlan(config.tokens, config.length, shard_texts, config.seed)
    progress.note(f"sampling {config.tokens:,} tokens of {config.model} on {device_name(sampler.device)}")
    with stop_on_signals() as request, progress.phase("sampling", config.tokens) as phase:

        def advance(tokens: int) -> None:
            phase.advance(tokens)
            request.raise_if_asked()

        try:
            folder.fill(sampler, plan, advance, phase.advance)
        except Stopped:
            return False
    return True


def _train(out: Path, sampled: bool, progress: Progress) -> TrainResult:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # of the sampled model
    if not sampled:
        return TrainResult(out, False, 0.0, 0, 0, 0.0, math.inf)
    return train(saved_config(RunConfig, out), out, resume=True, progress=progress)


def _saved_settings(out: Path) -> tuple[DistillConfig, int]:
    """Return the configuration of the distillation in `out`, and how many texts it samples at once."""
    path = out / SAMPLES / SETTINGS
    if not path.exists():
        raise InputError(f"no distillation to resume in {out}: {path} does not exist")
    values = read_json(path)
    texts = values.pop("shard_texts", None)
    try:
        config = DistillConfig.model_validate(values)
    except ValidationError as error:
        raise InputError(f"{path} is damaged, or of another version: {explain(DistillConfig, error)}") from None
    if not isinstance(texts, int) or texts < 1 or config.length is None or config.resolve("cpu") != config:
        raise InputError(f"{path} is damaged, or of another version: distill into another folder")
    return config, texts


def _plan(
    config: DistillConfig, given: DistillConfig, sampler: TextSampler, prompts: list[str]
) -> tuple[DistillConfig, dict[str, float]]:
    """Return the distillation, the largest that fits into --minutes if given, and the seconds of its phases."""
    speeds = _measure(config, sampler, prompts)

    def sized(tokens: int | None, states: int | None) -> tuple[DistillConfig, dict[str, float]]:
        other = config.model_copy(update={"tokens": tokens, "num_states": states})
        return other, speeds.plan(other, run_config(other, Path(SAMPLES), sampler.vocab_size))

    if config.minutes is None:
        return sized(config.tokens, config.num_states)
    sizes = []
    for tokens in (round(MIN_TOKENS * 2 ** (i / 4)) for i in range(60)):
        states = 1 << max(4, min(12, round(math.log2(tokens / TOKENS_PER_STATE))))
        sizes.append(sized(given.tokens or tokens, given.num_states or states))
    fitting = [size for size in sizes if sum(size[1].values()) <= 60 * config.minutes]
    if not fitting:
        least = time_text(sum(sizes[0][1].values()))
        raise InputError(
            f"--minutes {config.minutes:g} is too short: the smallest distillation takes about {least} here"
        )
    return fitting[-1]


def _measure(config: DistillConfig, sampler: TextSampler, prompts: list[str]) -> Speeds:
    """Sample a few tokens, embed and cluster some, and take a step of training; return the speeds."""
    assert config.num_states is not None and config.length is not None
    states, generator = config.num_states, torch.Generator().manual_seed(config.seed)
    encoded = [sampler.encode_prompt(prompt) for prompt in prompts[:MEASURED_TEXTS]]
    texts = (encoded * MEASURED_TEXTS)[: min(MEASURED_TEXTS, _texts_at_once(sampler, config, sampler.device))]

    def sample(length: int) -> int:
        return sum(len(text.tokens) for text in sampler.sample(texts, length, config.seed, lambda tokens: None))

    sample(1)  # warm-up
    sampling, drawn = _timed(lambda: sample(min(MEASURED_LENGTH, config.length or 1)))
    run = run_config(config, Path(SAMPLES), sampler.vocab_size)
    tokens = torch.randint(sampler.vocab_size, (STREAMS, run.batches.length), generator=generator)
    with torch.inference_mode():
        read = tokens[:2].to(sampler.device)
        embedding, output = _timed(lambda: sampler.model.base_model(input_ids=read, use_cache=False))
        points = output.last_hidden_state.flatten(0, 1).float()
        centroids = points[torch.arange(states, device=points.device) % len(points)][None]
        clustering, _ = _timed(lambda: nearest(points, centroids))
    learner = make_learner(run, make_fabric(run), Prepared(sampler.student_tokenizer(sampler.eos), {}, None))
    step, _ = _timed(lambda: learner.step(Batch(tokens, None, None, carry=False), None, learner.peak_lr))
    count = len(points)
    return Speeds(sampling / drawn, embedding / count, clustering / count / states, step / tokens.numel() / states)


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds that a function takes, and its result."""
    begun = time.perf_counter()
    result = work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begun, result


def _check_amount(config: DistillConfig) -> None:
    """Raise an InputError if there will be fewer training tokens than states."""
    assert config.tokens is not None and config.num_states is not None
    held_out = len(HOLD_OUT) / HOLD_OUT_EVERY
    if config.tokens * (1 - held_out) < config.num_states:
        raise InputError(
            f"--tokens {config.tokens:,} is too few for {config.num_states:,} states, as {held_out:.0%} are held out "
            "and every state needs one: sample more"
        )


def _texts_at_once(sampler: TextSampler, config: DistillConfig, device: torch.device) -> int:
    assert config.length is not None
    room = total_memory(device) // 3
    return max(1, min(MAX_TEXTS[device.type], room // sampler.bytes_per_text(config.length)))


def run_config(config: DistillConfig, samples: Path, vocab_size: int) -> RunConfig:
    """Return the configuration of the run that a resolved distillation trains on the folder `samples`.

    Each state starts as a cluster of the model's hidden states, with the counts of its tokens. Expectation maximization
    continues from there: of the scalar model it gives the lower perplexity (docs/reproduction/lee2025.md).
    """
    assert config.tokens is not None and config.num_states is not None and config.length is not None
    length = min(WINDOW, config.length)
    cells = config.num_states * vocab_size
    values: dict[str, Any] = {
        "data": str(samples),
        "tokenizer": {"kind": "file", "file": samples / "tokenizer"},
        "model": {"kind": "scalar", "num_states": config.num_states},
        "initialization": {
            "kind": "counts",
            "teacher": config.model,
            "gguf_file": config.gguf_file,
            "tokens": config.tokens,
            "pseudocount": SMOOTHING * config.tokens / cells,
            "kmeans": {"tokens": max(config.num_states, min(config.tokens, CLUSTERED * config.num_states))},
        },
        "batches": {"kind": "stream", "batch_size": STREAMS, "length": length},
        "optimizer": {"kind": "baum-welch", "step": 0.3, "pseudocount": SMOOTHING * STREAMS * length / cells},
        "schedule": {"kind": "cosine", "warmup": 0.0, "final_fraction": 0.1},
        "train": {"epochs": config.epochs, "seed": config.seed, "device": config.device},
    }
    return read_config(RunConfig, values, "hmmlm distill")
