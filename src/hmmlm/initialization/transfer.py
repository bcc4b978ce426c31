"""Transfer: a pretrained network as the network of a parameterization, and pieces of a teacher as its embeddings.

Lee & Berg-Kirkpatrick 2025, section 5 (the transformer reparameterization started from a language model) and appendix
B (centroids as state embeddings and the language-model head as word vectors, which they find to hurt).
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from hmmlm.data.tokenizer import Tokenizer
from hmmlm.errors import InputError
from hmmlm.initialization.alignment import pieces_of, same_tokens
from hmmlm.initialization.clustering import Clusters
from hmmlm.initialization.decoder import Decoder
from hmmlm.initialization.teacher import Teacher
from hmmlm.parameterization import Factored

DOUBLINGS = 8
"""How often `spread_out` doubles at most."""


class PretrainedStack(nn.Module):
    """[..., n, h] → [..., n, h]: the blocks of a language model, which read n vectors as if they were n tokens.

    Everything is as it was trained: causal, with positions, normalised at the end. Dropout stays off. What comes out
    is divided by `size`, which is 1 unless something else is said.
    """

    size: Tensor

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.graphable = isinstance(model, Decoder)  # in a CUDA graph; others may wait for the device
        if isinstance(model, Decoder):
            model.without_words()
        else:
            model = model.base_model
            model.set_input_embeddings(nn.Identity())  # read by nobody now, and large
        self.model = model.float().requires_grad_(True)
        self.register_buffer("size", torch.ones(()))
        self.train()

    def train(self, mode: bool = True) -> PretrainedStack:
        super().train(False)
        return self

    def forward(self, vectors: Tensor) -> Tensor:
        rows = vectors.reshape(-1, *vectors.shape[-2:])
        if isinstance(self.model, Decoder):
            result = self.model.read(rows, len(self.model.blocks))
        else:
            result = self.model(inputs_embeds=rows, use_cache=False).last_hidden_state
        return result.reshape(vectors.shape) / self.size


def from_pretrained(
    teacher: Teacher, states: int, vocab_size: int, generator: torch.Generator | None = None,
    words: Tensor | None = None, alike: float = 0.2, device: torch.device | str = "cpu",
) -> Factored:  # fmt: skip
    """A transformer parameterization whose one network, on one table, is the teacher's, which is used up; on the CPU.

    State embeddings are drawn with the mean and spread of the teacher's token embeddings, which its network knows how
    to read, then `spread_out` until they are no more `alike` than that. What the network says is brought to entries of
    mean square 1, and H, V and s are as large as in a `Factored` with initial = "unit". With `words` [vocab_size, h],
    the teacher's `word_vectors`, a state emits at first what the language model predicts after such an embedding; H
    and V are then of one size: language models have networks that say much and words that are small, and as they come,
    a step that suits the network is ten to thirty times too large for the words. To find all this out the network is
    read several times, on `device`.
    """
    if words is not None and words.shape[1] != teacher.hidden_size:
        raise InputError(
            f"the head of {teacher.name} has {words.shape[1]} dimensions and its network {teacher.hidden_size}: take "
            "the network without it, initialization.network = 'body'"
        )
    assert hasattr(teacher, "model")
    model = teacher.model
    table = (model.embedding if isinstance(model, Decoder) else model.get_input_embeddings()).weight.float().cpu()
    mean, spread = table.mean(0), table.std(0)
    stack = PretrainedStack(model)
    positions = min([m.num_embeddings for name, m in stack.named_modules() if _is_positions(name, m)], default=states)
    if states > positions:
        raise InputError(
            f"the network of {teacher.name} knows {positions} positions, and there are {states} states to read: use "
            "fewer states, or a teacher with rotary positions"
        )
    made = Factored(
        states, vocab_size, teacher.hidden_size, make_network=nn.Identity, split=False, mono=True,  # type: ignore[arg-type]
        initial="normal", generator=generator,
    )  # fmt: skip
    made.networks[0] = stack  # only now: it would be drawn again
    made.to(device)
    unit = teacher.hidden_size**-0.25
    with torch.no_grad():
        offsets = made.embeddings[0] * spread.to(device)
        made.embeddings[0].copy_(spread_out(stack, mean.to(device), offsets, alike))
        said = stack(made.embeddings[0]).square().mean().sqrt().clamp(min=1e-6)
        stack.size.copy_(said)
        made.start.mul_(unit)
        made.emission.mul_(unit)
        size = torch.stack([h.square().mean() for h in made.features()]).mean().sqrt()
        for head in made.heads.parameters():  # which are ours, unlike the network
            head.mul_(unit / size)
        if words is not None:
            spoken = words.square().mean().sqrt().clamp(min=1e-6).to(device)
            each = (said * spoken).sqrt()  # of H and of V: their product is as it was
            made.emission.copy_(words).mul_(each / spoken)
            emit: Tensor = made.heads[made.roles.index("emit")].weight  # type: ignore[assignment]
            nn.init.eye_(emit).mul_(each)
    return made.cpu()


@torch.no_grad()
def spread_out(stack: nn.Module, mean: Tensor, offsets: Tensor, alike: float) -> Tensor:
    """State embeddings mean [h] + offsets [n, h], offsets doubled until the network tells the states apart: until at
    most the part `alike` of what it says is `shared` by them, or as little as can be.

    At the spread of words that is two thirds to nine tenths with language models, and states that begin so alike are
    told apart late or never.
    """
    least, factor = torch.inf, 1.0
    for doublings in range(DOUBLINGS + 1):
        share = shared(stack(mean + 2**doublings * offsets))
        if share < least:
            least, factor = share, 2.0**doublings
        if share <= alike:
            break
    return mean + factor * offsets


@torch.no_grad()
def shared(vectors: Tensor) -> float:
    """The part of vectors [n, h] that is the same for all: the mean product of two, relative to that of one with
    itself; 0 of a single one."""
    n, one = len(vectors), vectors.square().sum() / len(vectors)
    two = (n * vectors.mean(0).square().sum() - one) / max(n - 1, 1)
    return float(two / one)


@torch.no_grad()
def word_vectors(teacher: Teacher, tokenizer: Tokenizer) -> Tensor:
    """The teacher's language-model head for our tokens [W, h]; where tokens differ, the mean over those that it has for
    the text of one of ours."""
    head = teacher.head().float()
    pieces = pieces_of(tokenizer)  # type: ignore[arg-type] # protocols say nothing of hashing
    if same_tokens(teacher.tokenizer, tokenizer):  # type: ignore[arg-type] # as above
        return head[: len(pieces)]
    space = " " if tokenizer.kind == "word" else ""  # words have none of their own
    texts = ["\n" if i == tokenizer.eos_id else space + piece.replace("▁", " ") for i, piece in enumerate(pieces)]
    ids = [torch.from_numpy(encoding.ids) for encoding in teacher.tokenizer.encode_batch(texts)]
    mean = head.mean(0)  # of a token that the teacher has nothing for
    return torch.stack([head[own.to(head.device)].mean(0) if len(own) else mean for own in ids])


def _is_positions(name: str, module: nn.Module) -> TypeGuard[nn.Embedding]:
    """A table of positions; rotary ones have none and go on for ever."""
    return isinstance(module, nn.Embedding) and ("position" in name or name.endswith("wpe"))


def check_width(model: Factored, width: int, what: str) -> None:
    """An error where vectors of this width are not those of the model."""
    hidden = model.embeddings[0].shape[1]
    if hidden != width:
        raise InputError(
            f"{what} has {width} dimensions and model.hidden is {hidden}: set model.hidden to {width}, or "
            f"initialization.kmeans.pca to {hidden}"
        )


@torch.no_grad()
def set_states(model: Factored, clusters: Clusters) -> None:
    """The centroids as state embeddings, in every table."""
    centroids = clusters.centroids.flatten(0, 1)
    if clusters.components is None:
        centroids = centroids + clusters.mean
    check_width(model, centroids.shape[1], "a centroid")
    for table in model.embeddings:
        table.copy_(centroids)


@torch.no_grad()
def set_words(model: Factored, teacher: Teacher, tokenizer: Tokenizer, clusters: Clusters) -> None:
    """The teacher's language-model head as word vectors, on the principal axes of the centroids if they have some."""
    head = word_vectors(teacher, tokenizer).to(clusters.mean.device)
    if clusters.components is not None:
        head = head @ clusters.components
    check_width(model, head.shape[1], "the teacher's head")
    model.emission.copy_(head)
