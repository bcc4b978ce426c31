"""Transfer of a teacher's weights: its network into a parameterization, its centroids and head into embeddings.

Lee & Berg-Kirkpatrick 2025, section 5 (a transformer parameterization initialized from a language model) and appendix B
(centroids as state embeddings and the language-model head as word vectors).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hmmlm.data.tokenizers import Tokenizer
from hmmlm.distillation.kmeans import Clusters
from hmmlm.errors import InputError
from hmmlm.models.factored import DenseFactored
from hmmlm.teachers.alignment import same_tokens, token_pieces
from hmmlm.teachers.gpt import GPT
from hmmlm.teachers.teacher import Teacher

MAX_DOUBLINGS = 8
"""How often `spread_states` doubles the offsets at most."""


class PretrainedStack(nn.Module):
    """The blocks of a language model applied to n vectors instead of n tokens, [..., n, h] → [..., n, h].

    Attention masks, positions and the final norm are those of the language model; dropout is always off. Outputs are
    divided by the buffer `size`, initially 1.

    Args:
        model: a `GPT` or a transformers model; it is modified: its token embeddings and head are removed.
    """

    size: Tensor

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.graphable = _is_graphable(model)
        """Whether forward and backward can be captured in a CUDA graph."""
        if isinstance(model, GPT):
            model.embedding = nn.Identity()  # type: ignore[assignment] # large, and not used from here on
        else:
            model = model.base_model
            model.set_input_embeddings(nn.Identity())  # as above
        self.model = model.float().requires_grad_(True)
        self.register_buffer("size", torch.ones(()))
        self.train()

    def train(self, mode: bool = True) -> PretrainedStack:
        super().train(False)
        return self

    def forward(self, vectors: Tensor) -> Tensor:
        rows = vectors.reshape(-1, *vectors.shape[-2:])
        if isinstance(self.model, GPT):
            output = self.model.embed_vectors(rows, len(self.model.blocks))
        else:
            output = self.model(inputs_embeds=rows, use_cache=False).last_hidden_state
        return output.reshape(vectors.shape) / self.size


def _is_graphable(model: Any) -> bool:
    """Return whether a network never waits for the device.

    Of the transformers models that is known for Llama: with SDPA attention it builds its mask without reading it back
    while a graph is captured, and its rotary positions do not depend on the input unless they are scaled dynamically.
    """
    if isinstance(model, GPT):
        return True
    config: Any = getattr(model, "config", None)
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        getattr(config, "model_type", None) == "llama"
        and config._attn_implementation == "sdpa"
        and rope.get("rope_type", "default") not in ("dynamic", "longrope")
    )


def from_pretrained(
    teacher: Teacher,
    states: int,
    vocab_size: int,
    generator: torch.Generator | None = None,
    words: Tensor | None = None,
    max_initial_similarity: float = 0.2,
    device: torch.device | str = "cpu",
) -> DenseFactored:
    """Make a transformer parameterization whose single network is the teacher's.

    State embeddings are drawn with the mean and standard deviation of the teacher's token embeddings, then spread by
    `spread_states`. Network outputs are scaled to a mean square of 1, and heads, word vectors and start vector have the
    scale of a `DenseFactored` with init="unit".

    With `words`, a state initially emits what the language model predicts after the state's embedding. Heads and word
    vectors then share one scale: pretrained networks have large hidden states and small word vectors, and a learning
    rate that suits the network would be ten to thirty times too large for the words.

    Args:
        teacher: its `model` becomes part of the result and cannot be used any more.
        states, vocab_size: sizes of the HMM.
        generator: source of random numbers.
        words: [vocab_size, h] initial word vectors, from `word_vectors`.
        max_initial_similarity: largest `mean_similarity` of the network's outputs across states; 1 disables spreading.
        device: where the network is evaluated to find these scales.

    Returns:
        The parameterization, on the CPU.
    """
    if words is not None and words.shape[1] != teacher.hidden_size:
        raise InputError(
            f"the head of {teacher.name} has {words.shape[1]} dimensions and its network {teacher.hidden_size}: use "
            "the network without the head, model.weights = 'body'"
        )
    assert hasattr(teacher, "model")
    model = teacher.model
    embedding = model.embedding if isinstance(model, GPT) else model.get_input_embeddings()
    table = embedding.weight.float().cpu()
    mean, deviation = table.mean(0), table.std(0)
    stack = PretrainedStack(model)
    positions = min((positions.num_embeddings for positions in _position_tables(stack)), default=states)
    if states > positions:
        raise InputError(
            f"the network of {teacher.name} has {positions} positions, and there are {states} states to read: use "
            "fewer states, or a teacher with rotary positions"
        )
    result = DenseFactored(
        states,
        vocab_size,
        teacher.hidden_size,
        make_network=nn.Identity,  # type: ignore[arg-type] # replaced below, because DenseFactored would reinitialize it
        split=False,
        mono=True,
        init="normal",
        generator=generator,
    )
    result.networks[0] = stack
    result.to(device)
    unit = teacher.hidden_size**-0.25
    with torch.no_grad():
        offsets = result.embeddings[0] * deviation.to(device)
        result.embeddings[0].copy_(spread_states(stack, mean.to(device), offsets, max_initial_similarity))
        hidden_rms = stack(result.embeddings[0]).square().mean().sqrt().clamp(min=1e-6)
        stack.size.copy_(hidden_rms)
        result.start.mul_(unit)
        result.emission.mul_(unit)
        feature_rms = torch.stack([h.square().mean() for h in result.features()]).mean().sqrt()
        for head in result.heads.parameters():
            head.mul_(unit / feature_rms)
        if words is not None:
            word_rms = words.square().mean().sqrt().clamp(min=1e-6).to(device)
            shared_rms = (hidden_rms * word_rms).sqrt()  # of heads and words: keeps their product
            result.emission.copy_(words).mul_(shared_rms / word_rms)
            emit: Tensor = result.heads[result.roles.index("emit")].weight  # type: ignore[assignment]
            nn.init.eye_(emit).mul_(shared_rms)
    return result.cpu()


@torch.no_grad()
def spread_states(stack: nn.Module, mean: Tensor, offsets: Tensor, max_similarity: float) -> Tensor:
    """Return state embeddings mean [h] + c·offsets [n, h] with the smallest c = 1, 2, 4, … that separates the states.

    States are separated if `mean_similarity` of the network's outputs is at most `max_similarity`; if no c achieves
    that, the c of least similarity is used. Pretrained networks give states that are spread like words a similarity of
    0.67 to 0.9, and training from there stalls.
    """
    least, factor = torch.inf, 1.0
    for doublings in range(MAX_DOUBLINGS + 1):
        similarity = mean_similarity(stack(mean + 2**doublings * offsets))
        if similarity < least:
            least, factor = similarity, 2.0**doublings
        if similarity <= max_similarity:
            break
    return mean + factor * offsets


@torch.no_grad()
def mean_similarity(vectors: Tensor) -> float:
    """Return the mean dot product of two different vectors of [n, h] over that of a vector with itself; 0 for n = 1."""
    n, own = len(vectors), vectors.square().sum() / len(vectors)
    other = (n * vectors.mean(0).square().sum() - own) / max(n - 1, 1)
    return float(other / own)


@torch.no_grad()
def word_vectors(teacher: Teacher, tokenizer: Tokenizer) -> Tensor:
    """Return the teacher's language-model head for the student's tokens [V, h].

    If the tokenizers differ, a student token gets the mean over the teacher's tokens of its text; a token whose text
    has none, the mean over all.
    """
    head = teacher.head().float()
    pieces = token_pieces(tokenizer)  # type: ignore[arg-type] # Tokenizer does not declare __hash__
    if same_tokens(teacher.tokenizer, tokenizer):  # type: ignore[arg-type] # as above
        return head[: len(pieces)]
    space = " " if tokenizer.kind == "word" else ""  # pieces of a word tokenizer have no space
    texts = ["\n" if i == tokenizer.eos_id else space + piece.replace("▁", " ") for i, piece in enumerate(pieces)]
    ids = [torch.from_numpy(encoding.ids) for encoding in teacher.tokenizer.encode_batch(texts)]
    mean = head.mean(0)
    return torch.stack([head[own.to(head.device)].mean(0) if len(own) else mean for own in ids])


def _position_tables(stack: PretrainedStack) -> list[nn.Embedding]:
    """Return the tables of learned positions; networks with rotary positions have none."""
    return [
        module
        for name, module in stack.named_modules()
        if isinstance(module, nn.Embedding) and ("position" in name or name.endswith("wpe"))
    ]


def check_width(model: DenseFactored, width: int, what: str) -> None:
    """Raise an InputError if vectors of this width do not fit the model's embeddings."""
    hidden = model.embeddings[0].shape[1]
    if hidden != width:
        raise InputError(f"{what} has {width} dimensions and model.hidden is {hidden}: set model.hidden to {width}")


@torch.no_grad()
def set_state_embeddings(model: DenseFactored, clusters: Clusters) -> None:
    """Set every table of state embeddings to the centroids."""
    centroids = clusters.vectors()
    check_width(model, centroids.shape[1], "a centroid")
    for table in model.embeddings:
        table.copy_(centroids)


@torch.no_grad()
def set_word_vectors(model: DenseFactored, teacher: Teacher, tokenizer: Tokenizer) -> None:
    """Set the word vectors to the teacher's language-model head."""
    head = word_vectors(teacher, tokenizer)
    check_width(model, head.shape[1], "the teacher's head")
    model.emission.copy_(head)
