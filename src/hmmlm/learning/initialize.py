"""The first phases of a run with a teacher: its embeddings are clustered, then label the first batches.

With `initialization.shared`, clusters and the labels of chunks are kept for other runs, in a folder of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor

from hmmlm.data.batches import Batch, ChunkBatches, StreamBatches
from hmmlm.data.tokenfile import TokenFile
from hmmlm.errors import InputError
from hmmlm.initialization.clustering import Clusters, fit_clusters
from hmmlm.initialization.decoder import layer_index
from hmmlm.initialization.embeddings import student_embeddings
from hmmlm.initialization.lvd import Embed, EmbeddedText, Labeller, hmm_from_labels, write_labels
from hmmlm.initialization.shared import (
    LabelStore,
    cluster_facts,
    name_of,
    only_one,
    places_of,
    teacher_facts,
    text_facts,
)
from hmmlm.initialization.teacher import Teacher, open_teacher, teacher_device
from hmmlm.initialization.transfer import check_width, from_pretrained, set_states, set_words, word_vectors
from hmmlm.learning.config import RunConfig
from hmmlm.learning.prepare import Prepared, make_parameterization
from hmmlm.learning.progress import Progress
from hmmlm.parameterization import Blocked, Factored, Parameterization

CLUSTERS = "clusters.safetensors"
LABELS = "labels"
DEFAULT_TOKENS, LARGEST_SHARE = 5_000_000, 0.1
"""Of the P(O, S) phase, where the configuration does not say."""
GPU_TOKENS = 12_800  # the least that a teacher on a GPU reads at once


def open_configured(config: RunConfig) -> Teacher | None:
    """The teacher that labels, if there is to be one: what is wrong with it is said before any work."""
    start = config.initialization
    if start.kind == "none":
        return None
    teacher = _open(config, start.random_teacher, config.train.device)
    layer_index(start.layer, teacher.layers)
    return teacher


def _open(config: RunConfig, random: bool, device: str) -> Teacher:
    start = config.initialization
    assert start.teacher is not None  # the configuration was validated
    with torch.random.fork_rng(devices=[]):  # a run that resumes opens it at another moment, and must draw the same
        return open_teacher(
            start.teacher, random=random, gguf_file=start.gguf_file, device=device, seed=config.train.seed
        )


def open_network(config: RunConfig) -> Teacher | None:
    """The teacher whose network is trained, if there is to be one; apart from the one that labels, which stays as it is
    and may have weights where this has random ones."""
    network = config.initialization.network
    return None if network == "own" else _open(config, network == "random", "cpu")


def make_initial(config: RunConfig, data: Prepared, network: Teacher | None = None) -> Parameterization:
    """New parameters, the network's among them where the configuration says so; it is opened unless it is given."""
    start, seed = config.initialization, config.train.seed
    network = network or open_network(config)
    if network is None:
        return make_parameterization(config.model, data, seed)
    words = word_vectors(network, data.tokenizer) if start.network == "pretrained" else None
    generator, device = torch.Generator().manual_seed(seed), teacher_device(config.train.device)
    states, vocab_size = config.model.states, data.tokenizer.vocab_size
    return from_pretrained(network, states, vocab_size, generator, words, start.alike, device)


def distilled_tokens(config: RunConfig, total_tokens: int) -> int:
    """Tokens of the P(O, S) phase in a run of `total_tokens`."""
    start = config.initialization
    if start.kind != "lvd":
        return 0
    return start.tokens or min(DEFAULT_TOKENS, int(LARGEST_SHARE * total_tokens))


class Distillation:
    """Clusters and labels of a run. Everything but the teacher lies in the run's folder, for a run that resumes."""

    def __init__(
        self, config: RunConfig, out: Path, data: Prepared, parameterization: Parameterization,
        teacher: Teacher | None = None,
    ) -> None:
        self.config, self.out, self.data = config, out, data
        self.start, self.parameterization = config.initialization, parameterization
        self.teacher = teacher
        self.groups, self.block_of_word = 1, None
        if isinstance(parameterization, Blocked):
            self.groups, self.block_of_word = parameterization.blocks.num_blocks, parameterization.blocks.block_of_word
        self.label: Labeller | None = None
        self.cached: TokenFile | None = None
        self.store: LabelStore | None = None
        self.places = places_of(data.tokens["train"])
        self.seed = config.train.seed if self.start.kmeans.seed is None else self.start.kmeans.seed
        self.reading: tuple[int, int, Iterator[Batch]] | None = None
        states, there = config.model.states, len(data.tokens["train"])
        if there < states:
            raise InputError(f"the training text has {there:,} tokens, fewer than the {states:,} states to find in it")
        if teacher is not None and (self.start.centroids or self.start.head):
            assert isinstance(parameterization, Factored)  # the configuration was validated
            check_width(parameterization, self.start.kmeans.pca or teacher.hidden_size, "a centroid")

    @property
    def rows(self) -> int:
        """Chunks that the teacher reads at once: on a GPU, small training batches would keep it waiting."""
        batches = self.config.batches
        fewest = GPU_TOKENS if self.teacher is not None and self.teacher.device.type == "cuda" else 1
        return max(batches.batch_size, -(-fewest // batches.length))

    @torch.no_grad()
    def prepare(self, progress: Progress, stop: Callable[[], None], fresh: bool) -> None:
        """Make or read the clusters and, if they are cached, the labels; `stop` is called often, and may raise.

        `fresh`: the run has no checkpoint, and what an earlier start left in its folder is not for it.
        """
        if fresh:
            for path in (self.out / CLUSTERS, (self.out / "data" / LABELS).with_suffix(".json")):
                path.unlink(missing_ok=True)
        self.teacher = self.teacher or open_configured(self.config)
        assert self.teacher is not None  # the configuration was validated
        embed = partial(
            student_embeddings, self.teacher, self.data.tokenizer, align=self.start.align, layer=self.start.layer
        )
        path = self.out / CLUSTERS
        if not path.exists():
            source = self.start.clusters
            clusters = self.find_clusters(embed, progress, stop) if source is None else Clusters.load(source)
            if self.teacher.device.type == "cuda":
                torch.cuda.empty_cache()  # of what was clustered
            self.check(clusters, source or path)
            clusters.save(path)
        clusters = Clusters.load(path)
        self.check(clusters, path)
        self.label = Labeller(embed, clusters.to(self.teacher.device), self.block_of_word)
        self.store = self.store or self.open_store(clusters)
        if self.start.labels == "cached":
            self.cached = self.cached_labels(progress, stop)

    def find_clusters(self, embed: Embed, progress: Progress, stop: Callable[[], None]) -> Clusters:
        """Those that another run with the same teacher, text and settings has made; else made here."""
        start, config = self.start, self.config
        if start.shared is None:
            return self.make_clusters(embed, progress, stop)
        name = name_of(
            self.shared_facts, start.kmeans.model_dump(exclude={"memory_gb", "seed"}), self.seed, config.model.states,
            self.rows, None if self.block_of_word is None else self.block_of_word.tolist(),
        )
        path = start.shared / f"clusters-{name}.safetensors"
        with only_one(path.with_suffix(".lock"), stop):
            if path.exists():
                progress.note(f"clusters of an earlier run: {path}")
                return Clusters.load(path)
            clusters = self.make_clusters(embed, progress, stop)
            clusters.save(path)
            return clusters

    @cached_property
    def shared_facts(self) -> list[object]:
        """Everything on which the embedding of a chunk depends."""
        start, seed = self.start, self.config.train.seed if self.start.random_teacher else None
        assert start.teacher is not None
        return [
            teacher_facts(start.teacher), start.gguf_file, seed, start.layer, start.align,
            text_facts(self.data.tokens["train"]), self.config.batches.length,
        ]  # fmt: skip

    def open_store(self, clusters: Clusters) -> LabelStore | None:
        """Where runs share labels, if they do: of chunks, which every run shows the teacher alike."""
        if self.start.shared is None or self.config.batches.kind != "chunks":
            return None
        path = self.start.shared / f"labels-{name_of(self.shared_facts, cluster_facts(clusters))}.bin"
        return LabelStore(path, len(self.data.tokens["train"]), self.config.model.states)

    def make_clusters(self, embed: Embed, progress: Progress, stop: Callable[[], None]) -> Clusters:
        """k-means over the embeddings of chunks drawn at random from the training text."""
        kmeans, states = self.start.kmeans, self.config.model.states
        used = min(kmeans.tokens, len(self.data.tokens["train"]))
        hold = int(kmeans.memory_gb * 1e9)
        if self.teacher is not None and self.teacher.device.type == "cuda":  # others may be on it, now or soon
            hold = min(hold, int(0.6 * torch.cuda.mem_get_info(self.teacher.device)[0]))
        pieces = EmbeddedText(partial(self.texts, used), embed, self.block_of_word, hold)
        progress.note(f"clustering the teacher's embeddings of {used:,} tokens into {states:,} states")
        with progress.phase("embedding and clustering", used * (kmeans.passes + 1)) as phase:

            def on_piece(name: str, count: int) -> None:
                phase.advance(count, now=name)
                stop()

            clusters = fit_clusters(
                pieces, states // self.groups, groups=self.groups, pca=kmeans.pca, start=kmeans.start,
                start_points=kmeans.start_points, update=kmeans.update, passes=kmeans.passes, seed=self.seed,
                on_piece=on_piece,
            )  # fmt: skip
        empty = int((clusters.sizes == 0).sum())
        progress.note(
            f"clustered {clusters.points:,} embeddings: mean squared distance {clusters.inertia:.4g}, "
            f"{clusters.sizes.min():,} to {clusters.sizes.max():,} a state, {empty:,} states without any"
        )
        self.store = self.open_store(clusters)
        if self.store is not None:  # what is still in memory need not be read again
            for (places, _), labels in zip(self.chunks(used), pieces.held_labels(clusters), strict=False):
                self.store.write(places, labels)
        return clusters

    def chunks(self, limit: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Chunks of the training text in a random order, `limit` tokens in all: places and tokens [B,T]."""
        batches, files = self.config.batches, (self.places, self.data.tokens["train"])
        both = (
            ChunkBatches(file, self.rows, batches.length, shuffle=True, drop_last=False, seed=self.seed).epoch(0)
            for file in files
        )  # fmt: skip
        for where, batch in zip(*both, strict=True):
            known = batch.tokens >= 0
            beyond = known.flatten().cumsum(0).view_as(known) > limit
            yield where.tokens.masked_fill(beyond, -1), batch.tokens.masked_fill(beyond, -1)
            limit -= int(known.sum())
            if limit <= 0:
                return

    def texts(self, limit: int) -> Iterator[Tensor]:
        return (tokens for _, tokens in self.chunks(limit))

    def check(self, clusters: Clusters, where: Path) -> None:
        """An error where clusters are not those of this model and teacher."""
        assert self.teacher is not None
        blocks, each = clusters.centroids.shape[:2]
        own = self.config.model.states // self.groups
        if (blocks, each) != (self.groups, own):
            raise InputError(
                f"{where} has {blocks} × {each} clusters (blocks × states), this model {self.groups} × {own}"
            )
        if len(clusters.mean) != self.teacher.hidden_size:
            raise InputError(
                f"{where} is of embeddings of {len(clusters.mean)} dimensions, the teacher {self.start.teacher} has "
                f"{self.teacher.hidden_size}: use the teacher that the clusters were made with"
            )

    def cached_labels(self, progress: Progress, stop: Callable[[], None]) -> TokenFile | None:
        """Labels of the whole training text, from the run's folder or written there; None if they are in the store."""
        path, tokens, batches = self.out / "data" / LABELS, self.data.tokens["train"], self.config.batches
        assert self.label is not None
        if path.with_suffix(".json").exists():
            return TokenFile.open(path)
        label = self.label
        with progress.phase("labels", len(tokens)) as phase:
            if self.store is not None:
                files = (label_batches(self.config, file, shuffle=False).epoch(0) for file in (self.places, tokens))
                for where, batch in zip(*files, strict=True):
                    stop()
                    self.labels_at(where.tokens, batch.tokens)
                    phase.advance(int((batch.tokens >= 0).sum()))
                return None

            def counted(text: Tensor) -> Tensor:
                stop()
                phase.advance(int((text >= 0).sum()))
                return label(text)

            return write_labels(path, tokens, counted, self.config.model.states, self.rows, batches.length)

    def labels(self, batch: Batch, epoch: int, index: int) -> Tensor:
        """States [B,T] for a batch on the CPU, number `index` of its epoch."""
        assert self.label is not None
        beside = self.places if self.store is not None else self.cached
        if beside is None:
            return self.label(batch.tokens)
        if self.reading is None or self.reading[:2] != (epoch, index):
            shuffle = self.config.batches.shuffle
            self.reading = (epoch, index, label_batches(self.config, beside, shuffle).epoch(epoch, index))
        self.reading = (epoch, index + 1, self.reading[2])
        found = next(self.reading[2]).tokens
        return found if self.store is None else self.labels_at(found, batch.tokens)

    def labels_at(self, places: Tensor, tokens: Tensor) -> Tensor:
        """States [B,T] of chunks: those in the store from there, others by the teacher, and into it."""
        assert self.label is not None
        if self.store is None:
            return self.label(tokens)
        found = self.store.read(places)
        if bool(((found < 0) & (tokens >= 0)).any()):
            with only_one(self.store.lock, lambda: None):  # whoever comes second reads what the first has asked for
                found = self.store.read(places)
                unknown = ((found < 0) & (tokens >= 0)).any(1)
                if bool(unknown.any()):
                    found[unknown] = self.label(tokens[unknown])
                    self.store.write(places[unknown], found[unknown])
        return found

    def set_embeddings(self) -> None:
        """Centroids and head into the parameters, as configured."""
        model, label = self.parameterization, self.label
        assert label is not None and self.teacher is not None
        if self.start.centroids:
            assert isinstance(model, Factored)
            set_states(model, label.clusters)
        if self.start.head:
            assert isinstance(model, Factored)
            set_words(model, self.teacher, self.data.tokenizer, label.clusters)

    def assign_counts(self, progress: Progress, stop: Callable[[], None]) -> None:
        """The closed-form start: the maximum of P(O, S) over some of the training text, that clustered by default."""
        tokens = min(self.start.tokens or self.start.kmeans.tokens, len(self.data.tokens["train"]))

        def labelled() -> Iterator[tuple[Tensor, Tensor]]:
            with progress.phase("counting", tokens) as phase:
                for places, text in self.chunks(tokens):
                    yield text, self.labels_at(places, text)
                    phase.advance(int((text >= 0).sum()))
                    stop()

        model = self.parameterization
        batches, eos = self.config.batches, self.data.tokenizer.eos_id
        restarts = eos if batches.kind == "stream" and batches.reset_at_eos else None
        hmm = hmm_from_labels(labelled(), model.states, model.vocab_size, self.start.pseudocount, restarts)
        model.assign(hmm)


def set_frozen(config: RunConfig, model: Parameterization, frozen: bool) -> None:
    """Exclude what centroids and head set from learning, or take it in."""
    if isinstance(model, Factored):
        tables = [*model.embeddings] if config.initialization.centroids else []
        for parameter in [*tables, model.emission] if config.initialization.head else tables:
            parameter.requires_grad_(not frozen)


def label_batches(config: RunConfig, beside: TokenFile, shuffle: bool) -> StreamBatches | ChunkBatches:
    """What lies beside the training text, token by token, in the batches that it comes in."""
    batches, seed = config.batches, config.train.seed
    if batches.kind == "chunks":
        return ChunkBatches(beside, batches.batch_size, batches.length, shuffle=shuffle, drop_last=False, seed=seed)
    return StreamBatches(  # no label stands for <eos>
        beside, batches.batch_size, batches.length, shuffle=shuffle, reset_at_eos=False, eos_id=0, seed=seed
    )
