"""The start of a run with a teacher: cluster its embeddings and label the text with the clusters, or draw next words.

Of several processes, rank 0 clusters and draws; each opens the teacher and labels its share of the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hmmlm.config.initialization import CountsConfig, LabelConfig, LvdConfig
from hmmlm.config.run import RunConfig
from hmmlm.data.batches import Batch, ChunkBatches, StreamBatches
from hmmlm.data.files import exclusive, replacing
from hmmlm.data.tokenizers import Tokenizer
from hmmlm.distillation.cache import (
    LabelStore,
    cluster_facts,
    content_name,
    teacher_facts,
    text_facts,
)
from hmmlm.distillation.kmeans import Clusters, fit_clusters
from hmmlm.distillation.labels import (
    EmbeddedText,
    LabelSource,
    StoredLabels,
    TeacherLabels,
    hmm_from_labels,
)
from hmmlm.distillation.next_words import NEXT_WORDS, open_next_words, word_dtype
from hmmlm.distillation.transfer import check_width, set_state_embeddings, set_word_vectors
from hmmlm.distributed.ranks import world
from hmmlm.errors import InputError
from hmmlm.models.base import Model
from hmmlm.models.factored import DenseFactored
from hmmlm.runs.progress import Progress
from hmmlm.teachers.checks import layer_index
from hmmlm.teachers.embeddings import student_embeddings
from hmmlm.teachers.teacher import Teacher, open_teacher
from hmmlm.terminal import counted
from hmmlm.training.prepare import Prepared

CENTROIDS = "clusters.safetensors"
DEFAULT_TOKENS, MAX_FRACTION = 5_000_000, 0.1
"""Of the P(O, S) phase, where the configuration does not set it."""
GPU_TOKENS = 12_800  # a teacher on a GPU reads at least this many tokens at once
STREAMS, WINDOW = 32, 128
"""Rows and tokens that a teacher of next words reads at once. Each row starts without context, so there are few."""


def open_label_teacher(config: RunConfig) -> Teacher | None:
    """Open the teacher that labels, if the configuration has one; errors are raised before any work."""
    start = config.initialization
    if not isinstance(start, LabelConfig):
        return None
    with torch.random.fork_rng(devices=[]):  # a resumed run opens it at another moment, and must draw the same
        teacher = open_teacher(
            start.teacher,
            random=start.random_teacher,
            gguf_file=start.gguf_file,
            device=config.train.device,
            seed=config.train.seed,
        )
    layer_index(start.layer, teacher.layers)
    return teacher


def joint_tokens(config: RunConfig, total_tokens: int) -> int:
    """Return the tokens of the P(O, S) phase in a run of `total_tokens`."""
    start = config.initialization
    if not isinstance(start, LvdConfig):
        return 0
    return start.tokens or min(DEFAULT_TOKENS, int(MAX_FRACTION * total_tokens))


def check_start(start: LabelConfig, model: Model, tokens: int, teacher: Teacher) -> None:
    """Raise an InputError if a teacher cannot initialize a model on a training text of this many tokens."""
    if tokens < model.num_states:
        raise InputError(
            f"the training text has {counted(tokens, 'token')}, fewer than the {model.num_states:,} states to find"
        )
    if start.kmeans.pca is not None and start.kmeans.pca > teacher.hidden_size:
        raise InputError(
            f"initialization.kmeans.pca is {start.kmeans.pca}, and the embeddings of the teacher have "
            f"{teacher.hidden_size} dimensions: use fewer components"
        )
    if isinstance(start, LvdConfig) and (start.centroids or start.head):
        assert isinstance(model, DenseFactored)  # the configuration was validated
        check_width(model, teacher.hidden_size, "a centroid")


class WarmStart:
    """Clusters and labels of a run. Everything but the teacher is in the run's folder, for a run that resumes."""

    def __init__(
        self,
        config: RunConfig,
        out: Path,
        data: Prepared,
        model: Model,
        teacher: Teacher | None,
        progress: Progress,
        on_work: Callable[[], None],
    ) -> None:
        """`on_work` is called often during long work, and may raise to stop it."""
        assert isinstance(config.initialization, LabelConfig)
        self.config, self.start, self.out, self.ranks = config, config.initialization, out, world()
        self.tokenizer, self.model, self.progress, self.on_work = data.tokenizer, model, progress, on_work
        self.train, self.block_of_word = data.tokens["train"], data.block_of_word
        self.teacher = teacher or open_label_teacher(config)
        self.seed = config.train.seed if self.start.kmeans.seed is None else self.start.kmeans.seed
        self.groups = 1 if self.block_of_word is None else int(self.block_of_word.max()) + 1

    @property
    def rows(self) -> int:
        """Chunks that the teacher reads at once: small training batches would underuse a GPU."""
        batches = self.config.batches
        fewest = GPU_TOKENS if self.teacher is not None and self.teacher.device.type == "cuda" else 1
        return max(batches.batch_size, -(-fewest // batches.length))

    @torch.no_grad()
    def open_labels(self, fresh: bool) -> LabelSource:
        """Find or compute the clusters, and return the source of labels.

        `fresh`: the run has no checkpoint, and what an earlier start left in its folder is not used.
        """
        assert self.teacher is not None
        path, start = self.out / CENTROIDS, self.start
        local = self.out / "data" / "labels.bin"

        def cluster() -> None:
            if fresh:
                path.unlink(missing_ok=True)
                local.unlink(missing_ok=True)
            if path.exists():
                return
            clusters = self.find_clusters() if start.clusters is None else Clusters.load(start.clusters)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # of the embeddings
            self.check_clusters(clusters, start.clusters or path)
            clusters.save(path)

        self.ranks.on_first(cluster)
        clusters = Clusters.load(path)
        self.check_clusters(clusters, path)
        self.clusters = clusters.to(self.teacher.device)
        source = TeacherLabels(self.embed, self.clusters, self.block_of_word)
        store = self.open_store(clusters)
        cached = isinstance(start, LvdConfig) and start.labels == "cached"
        if store is None and cached:
            store = LabelStore(local, len(self.train), self.model.num_states, self.ranks.rank)
        if store is None:
            return source
        stored = StoredLabels(source, store)
        if cached:
            self.label_text(stored)
        return stored

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the teacher's embeddings [B, T, H] of student tokens [B, T]."""
        assert self.teacher is not None  # until it is released
        start = self.start
        return student_embeddings(self.teacher, self.tokenizer, tokens, align=start.align, layer=start.layer)

    def find_clusters(self) -> Clusters:
        """Return the clusters that another run with the same teacher, text and settings has cached, or compute them."""
        start = self.start
        if start.cache is None:
            return self.make_clusters()
        # Without what is not set: names stay those of caches that were made before it could be.
        kmeans = start.kmeans.model_dump(exclude={"memory_gb", "seed"}, exclude_none=True)
        blocks = None if self.block_of_word is None else self.block_of_word.tolist()
        name = content_name(self.cache_facts, kmeans, self.seed, self.model.num_states, self.rows, blocks)
        path = start.cache / f"clusters-{name}.safetensors"
        with exclusive(path.with_suffix(".lock"), self.on_work):
            if path.exists():
                self.progress.note(f"using the cached clusters {path}")
                return Clusters.load(path)
            clusters = self.make_clusters()
            clusters.save(path)
            return clusters

    @cached_property
    def cache_facts(self) -> list[object]:
        """Everything that the embedding of a chunk depends on."""
        start = self.start
        seed = self.config.train.seed if start.random_teacher else None
        identity = [teacher_facts(start.teacher), start.gguf_file, seed, start.layer, start.align]
        return [*identity, text_facts(self.train), self.config.batches.length]

    def open_store(self, clusters: Clusters) -> LabelStore | None:
        """Return the store in which runs share the labels of chunks; None for streams, which differ between runs."""
        if self.start.cache is None or self.config.batches.kind != "chunks":
            return None
        path = self.start.cache / f"labels-{content_name(self.cache_facts, cluster_facts(clusters))}.bin"
        return LabelStore(path, len(self.train), self.model.num_states, self.ranks.rank)

    def make_clusters(self) -> Clusters:
        """Run k-means over the embeddings of chunks drawn at random from the training text."""
        kmeans, states = self.start.kmeans, self.model.num_states
        used = min(kmeans.tokens, len(self.train))
        max_bytes = int(kmeans.memory_gb * 1e9)
        assert self.teacher is not None
        if self.teacher.device.type == "cuda":  # other processes may use it
            max_bytes = min(max_bytes, int(0.6 * torch.cuda.mem_get_info(self.teacher.device)[0]))
        pieces = EmbeddedText(lambda: (c.tokens for c in self.chunks(used)), self.embed, self.block_of_word, max_bytes)
        self.progress.note(f"clustering the teacher's embeddings of {used:,} tokens into {counted(states, 'state')}")
        with ExitStack() as stack:
            phase = stack.enter_context(self.progress.phase("embedding", used))
            embedded = 0

            def on_piece(name: str, count: int) -> None:
                nonlocal phase, embedded
                if embedded == used:  # a pass over embeddings in memory takes a fraction of the time
                    stack.close()
                    phase = stack.enter_context(self.progress.phase("clustering", used * kmeans.passes))
                embedded += count
                phase.advance(count, now=name)
                self.on_work()

            clusters = fit_clusters(
                pieces,
                states // self.groups,
                groups=self.groups,
                passes=kmeans.passes,
                seed=self.seed,
                pca=kmeans.pca,
                on_piece=on_piece,
            )
        empty = int((clusters.sizes == 0).sum())
        self.progress.note(
            f"clustered {clusters.points:,} embeddings: mean squared distance {clusters.inertia:.4g}, "
            f"{clusters.sizes.min():,} to {clusters.sizes.max():,} per state, {counted(empty, 'state')} without any"
        )
        store = self.open_store(clusters)
        if store is not None:  # the embeddings in memory need not be computed again
            for chunk, labels in zip(self.chunks(used), pieces.kept_labels(clusters), strict=False):
                assert chunk.places is not None
                store.write(chunk.places, labels)
        return clusters

    def chunks(self, limit: int) -> Iterator[Batch]:
        """Yield chunks of the training text in a random order, `limit` tokens in all."""
        length = self.config.batches.length
        for batch in ChunkBatches(self.train, self.rows, length, shuffle=True, seed=self.seed).epoch(0):
            known = batch.tokens >= 0
            beyond = known.flatten().cumsum(0).view_as(known) > limit
            assert batch.places is not None
            tokens, places = batch.tokens.masked_fill(beyond, -1), batch.places.masked_fill(beyond, -1)
            yield batch._replace(tokens=tokens, places=places)
            limit -= int(known.sum())
            if limit <= 0:
                return

    def check_clusters(self, clusters: Clusters, where: Path) -> None:
        """Raise an InputError if clusters do not fit this model and teacher."""
        assert self.teacher is not None
        blocks, each = clusters.centroids.shape[:2]
        own = self.model.num_states // self.groups
        if (blocks, each) != (self.groups, own):
            raise InputError(
                f"{where} has {blocks} × {each} clusters (blocks × states), this model {self.groups} × {own}"
            )
        if len(clusters.mean) != self.teacher.hidden_size:
            raise InputError(
                f"{where} has embeddings of {len(clusters.mean)} dimensions, the teacher {self.start.teacher} "
                f"{self.teacher.hidden_size}: use the teacher that the clusters were made with"
            )

    def label_text(self, source: StoredLabels) -> None:
        """Label the whole training text, in chunks."""
        with self.progress.phase("labels", len(self.train)) as phase:
            length = self.config.batches.length
            chunks = ChunkBatches(self.train, self.rows, length, shuffle=False, seed=0)
            for number in range(self.ranks.rank, chunks.steps_per_epoch, self.ranks.count):
                self.on_work()
                chunk = next(chunks.epoch(0, number))
                source.labels(chunk)
                phase.advance(self.ranks.count * chunk.num_tokens())
        self.ranks.gather(None)  # until all labels are there

    def initialize(self, source: LabelSource) -> None:
        """Set parameters as configured: the closed-form maximum of P(O, S), or centroids and head as embeddings."""
        if isinstance(self.start, CountsConfig):
            self.assign_counts(self.start, source)
        elif isinstance(self.start, LvdConfig):
            if self.start.centroids:
                assert isinstance(self.model, DenseFactored)
                set_state_embeddings(self.model, self.clusters)
            if self.start.head:
                assert isinstance(self.model, DenseFactored) and self.teacher is not None
                set_word_vectors(self.model, self.teacher, self.tokenizer)

    def assign_counts(self, start: CountsConfig, source: LabelSource) -> None:
        """Set the model to the closed-form maximum of P(O, S) over some of the training text."""
        limit = min(start.tokens or start.kmeans.tokens, len(self.train))

        def labeled() -> Iterator[tuple[Tensor, Tensor]]:
            with self.progress.phase("counting", limit) as phase:
                for chunk in islice(self.chunks(limit), self.ranks.rank, None, self.ranks.count):
                    yield chunk.tokens, source.labels(chunk)
                    phase.advance(self.ranks.count * chunk.num_tokens())
                    self.on_work()

        batches = self.config.batches
        resets = batches.kind == "stream" and batches.reset_at_eos
        eos = self.tokenizer.eos_id if resets else None
        self.model.assign(
            hmm_from_labels(labeled(), self.model.num_states, self.model.vocab_size, start.pseudocount, eos)
        )

    def release_teacher(self) -> None:
        """Free the teacher's memory."""
        self.teacher = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def freeze_embeddings(model: Model, start: LabelConfig, frozen: bool) -> None:
    """Exclude the embeddings that centroids and head set from training, or include them again."""
    if isinstance(start, LvdConfig) and isinstance(model, DenseFactored):
        tables = [*model.embeddings] if start.centroids else []
        for parameter in [*tables, model.emission] if start.head else tables:
            parameter.requires_grad_(not frozen)


def check_teacher(config: RunConfig, tokenizer: Tokenizer) -> None:
    """Raise an InputError if the teacher is missing or has other tokens."""
    from hmmlm.baselines.neural import load_baseline

    path = config.next_words.teacher
    if path is None:
        return
    _, its_own = load_baseline(path)
    if its_own.fingerprint() != tokenizer.fingerprint():
        raise InputError(
            f"next_words.teacher: {path} has another vocabulary than this run: train it on the same text with the same "
            "[tokenizer] settings, or start this run with --data and the folder of that one"
        )


@torch.no_grad()
def draw_next_words(
    config: RunConfig, out: Path, data: Prepared, device: torch.device, progress: Progress, on_work: Callable[[], None]
) -> np.ndarray:
    """Return the words [tokens, drawn] that the teacher draws; they are stored in the run's folder, and drawn once.

    `on_work` is called often, and may raise to stop.
    """
    from hmmlm.baselines.neural import load_baseline

    settings, path, tokens, tokenizer = config.next_words, out / NEXT_WORDS, data.tokens["train"], data.tokenizer

    def draw() -> None:
        assert settings.teacher is not None
        network, _ = load_baseline(settings.teacher)
        network = network.to(device)
        generator = torch.Generator(device).manual_seed(config.train.seed)
        words = np.empty((len(tokens), settings.drawn), word_dtype(tokenizer.vocab_size))
        batches = StreamBatches(
            tokens,
            min(STREAMS, len(tokens)),
            WINDOW,
            shuffle=False,
            reset_at_eos=False,
            eos_id=tokenizer.eos_id,
            seed=0,
        )
        hidden = None
        with progress.phase("next words", len(tokens)) as phase:
            for batch in batches.epoch(0):
                assert batch.places is not None
                drawn, hidden = network.draw(batch.tokens.to(device), hidden, settings.drawn, generator)
                known = batch.places >= 0
                words[batch.places[known].numpy()] = drawn.cpu()[known].numpy()
                phase.advance(batch.num_tokens())
                on_work()
        with replacing(path) as (temporary,), temporary.open("wb") as file:
            np.save(file, words)

    world().on_first(lambda: None if path.exists() else draw())  # one network reads all of the text in order
    return open_next_words(path, len(tokens), settings.drawn, tokenizer.vocab_size)
