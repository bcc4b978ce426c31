"""Hugging Face teachers: causal and masked language models from a folder, the hub or a GGUF file."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hmmlm.data.files import parse_json
from hmmlm.data.tokenizers import SentencePieceTokenizer
from hmmlm.errors import InputError, require
from hmmlm.numerics.distributions import check_finite
from hmmlm.teachers.checks import check_vocabulary, find_teacher, layer_index
from hmmlm.teachers.tokenizers import FastTokenizer

HUB_TIMEOUT = 10.0
"""Seconds to wait for the hub's first response."""
WEIGHTS = ("*.safetensors", "*.bin", "*.safetensors.index.json")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.txt", "vocab.json")
UNUSED_WEIGHTS = ("pooler", "lm_head", "cls.", "embed_out", "position_ids")
"""Parts of a network that its hidden states do not depend on."""


class HuggingFaceTeacher:
    """A transformers model as a `Teacher`; `model` includes the language-model head if there is one."""

    def __init__(self, name: str, model: Any, tokenizer: FastTokenizer, device: torch.device) -> None:
        self.name, self.device, self.tokenizer = name, device, tokenizer
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model = model.to(device=device, dtype=dtype).eval().requires_grad_(False)
        for weight, value in self.model.named_parameters():
            check_finite(value, f"the teacher {name}: {weight}")
        self.model.config.use_cache = False
        config = self.model.config.get_text_config()
        self.hidden_size, self.layers = int(config.hidden_size), int(config.num_hidden_layers)
        self.context = int(getattr(config, "max_position_embeddings", None) or 1 << 31)  # recurrent: unlimited
        self.vocab_size = self.model.get_input_embeddings().weight.shape[0]
        check_vocabulary(name, len(tokenizer.pieces), self.vocab_size)

    @torch.no_grad()
    def embed(self, tokens: Tensor, layer: int = -1) -> Tensor:
        layer = layer_index(layer, self.layers)
        known = tokens >= 0
        mask = None if bool(known.all()) else known.long().to(self.device)  # attention is faster without a mask
        last = layer == self.layers
        output = self.model.base_model(
            input_ids=tokens.clamp(min=0).to(self.device), attention_mask=mask, output_hidden_states=not last
        )
        hidden: Tensor = output.last_hidden_state if last else output.hidden_states[layer]
        return hidden

    def head(self) -> Tensor:
        head = self.model.get_output_embeddings() or self.model.get_input_embeddings()
        weight: Tensor = head.weight
        return weight


def open_huggingface(
    name: str, *, random: bool, gguf_file: str | None, device: torch.device, seed: int
) -> HuggingFaceTeacher:
    """Open a teacher with transformers; see `open_teacher`. Files are checked before anything large is read."""
    model, tokenizer = load_network(name, gguf_file, random=random, seed=seed)
    return HuggingFaceTeacher(name, model, fast_tokenizer(name, tokenizer), device)


def convert_gguf(path: Path, folder: Path) -> None:
    """Write the model of a GGUF file as a Hugging Face folder in float16, which opens much faster."""
    if path.suffix != ".gguf" or not path.is_file():
        raise InputError(f"{path} is not a GGUF file: give the path of a .gguf file")
    model, tokenizer = load_network(str(path), None)
    with _quiet(_import_packages("transformers")):
        tokenizer.save_pretrained(folder)
        model.half().save_pretrained(folder)


def load_network(
    name: str, gguf_file: str | None, *, random: bool = False, seed: int = 0, generates: bool = False
) -> tuple[Any, Any]:
    """Return the model, in float32 on the CPU, and the tokenizer.

    `generates`: the model is sampled from, so that it must be causal and have a trained head.
    """
    location, gguf_file = locate(name, gguf_file, random)
    transformers = _import_packages("transformers", *(["gguf", "accelerate"] if gguf_file else []))
    arguments: dict[str, Any] = {} if gguf_file is None else {"gguf_file": gguf_file}
    if not Path(location).is_dir():
        arguments |= _hub_arguments(location, gguf_file or "config.json")
    with _quiet(transformers):
        config = _from_pretrained(name, "configuration", transformers.AutoConfig, location, **arguments)
        if config.is_encoder_decoder:
            raise InputError(f"the teacher {name} is an encoder-decoder: use a causal or a masked language model")
        tokenizer_class = _tokenizer_class(transformers, config, location, gguf_file)
        tokenizer = _from_pretrained(name, "tokenizer", tokenizer_class, location, **arguments)
        model_class = _model_class(transformers, config, gguf_file)
        if generates and model_class is not transformers.AutoModelForCausalLM:
            kind = next(iter(config.architectures or ()), config.model_type)
            raise InputError(f"{name} is no causal language model ({kind}), so it cannot be sampled: use one that is")
        if random:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                return model_class.from_config(config, dtype=torch.float32), tokenizer
        if gguf_file is not None:  # quantized weights cannot be trained or saved
            arguments["quantization_config"] = transformers.GgufConfig(dequantize=True)
        model, info = _from_pretrained(
            name,
            "network",
            model_class,
            location,
            config=config,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, with names and shapes
            **arguments,
        )
    _check_weights(name, info, () if generates else UNUSED_WEIGHTS)
    return model, tokenizer


def locate(name: str, gguf_file: str | None, random: bool) -> tuple[str, str | None]:
    """Return the folder or hub name and the GGUF file in it, if any; check local files without transformers."""
    name, gguf_file = find_teacher(name, gguf_file)
    path = Path(name)
    if not path.is_dir() or gguf_file is not None:
        return name, gguf_file
    ggufs = sorted(path.glob("*.gguf"))
    if not (path / "config.json").exists():
        hint = f"give the file, {ggufs[0]}" if ggufs else "it should hold config.json, weights and a tokenizer"
        raise InputError(f"the teacher folder {path} has no config.json: {hint}")
    _refuse_run(path)
    if not random and not any(next(path.glob(pattern), None) for pattern in WEIGHTS):
        raise InputError(
            f"the teacher folder {path} has no weights (*.safetensors or *.bin): complete the download, "
            "or use random weights"
        )
    if not any((path / file).exists() for file in TOKENIZERS):
        raise InputError(
            f"the teacher folder {path} has no tokenizer ({', '.join(TOKENIZERS)}): copy the tokenizer's files there"
        )
    return name, None


def _refuse_run(path: Path) -> None:
    """Raise an InputError if the folder is a run of hmmlm that contains no teacher."""
    try:
        fields = parse_json(path / "config.json")
    except InputError:
        return  # transformers reports what is wrong with the file
    if not isinstance(fields, dict) or not {"data", "tokenizer", "model", "train"} <= fields.keys():
        return
    remedy = "give a language model of Hugging Face or, with --teacher, a run of `hmmlm teacher`"
    if "initialization" in fields:
        raise InputError(f"{path} is a run of `hmmlm train`: {remedy}")
    if isinstance(fields["model"], dict) and "kind" in fields["model"]:
        raise InputError(f"{path} is a run of `hmmlm baseline`: {remedy}")
    raise InputError(f"the teacher in {path} has no validated weights yet: resume with `hmmlm teacher --resume {path}`")


def _hub_arguments(name: str, file: str) -> dict[str, Any]:
    """Return arguments that read a hub repository from the cache alone if the hub does not respond.

    The hub is queried once; transformers would retry for half a minute.
    """
    hub = _import_packages("huggingface_hub")
    try:
        hub.model_info(name, timeout=HUB_TIMEOUT)
        return {}
    except Exception as error:  # of huggingface_hub or of its HTTP library: no common class
        valid = not isinstance(error, ValueError)  # ValueError: not a possible name on the hub
        if valid and isinstance(hub.try_to_load_from_cache(name, file), str):
            return {"local_files_only": True}
        status = getattr(getattr(error, "response", None), "status_code", None)
        refused, unreachable = (
            f"responds with status {status}",
            f"cannot be reached ({_summary(error)})",
        )
        reason = refused if status else unreachable
        raise InputError(
            f"no teacher {name}: it is no folder, not in the hub's cache, and the hub {reason}: check the name, or "
            "download it"
        ) from error


def _import_packages(*packages: str) -> Any:
    """Check that all packages are installed and return the first."""
    require("teacher", *packages, reader="this teacher")
    return importlib.import_module(packages[0])


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Suppress the progress bars and advice of transformers, which would interrupt the command's own progress."""
    logging = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _from_pretrained(name: str, part: str, kind: Any, location: str, **arguments: Any) -> Any:
    """Call `kind.from_pretrained`; errors about bad or missing files become an InputError that names the part."""
    try:
        return kind.from_pretrained(location, **arguments)
    except Exception as error:  # of transformers, huggingface_hub, safetensors, tokenizers or gguf: no common class
        if isinstance(error, MemoryError) or "out of memory" in str(error):
            raise
        raise InputError(
            f"the {part} of the teacher {name} cannot be loaded ({_summary(error)}): check the files, or download them "
            "again"
        ) from error


def _summary(error: Exception) -> str:
    """Return the first line of an error's message, or its class."""
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__


def _tokenizer_class(transformers: Any, config: Any, location: str, gguf_file: str | None) -> Any:
    """Return the class that reads the tokenizer."""
    folder, sentencepiece = Path(location), Path(location) / "tokenizer.model"
    described = any((folder / file).exists() for file in ("tokenizer.json", "tokenizer_config.json"))
    if gguf_file is None and config.model_type == "llama" and sentencepiece.exists() and not described:
        SentencePieceTokenizer(sentencepiece)  # a damaged file is an error; transformers would ask for tiktoken
        return transformers.LlamaTokenizer  # AutoTokenizer would not prepend a space to the text, as Llama does
    return transformers.AutoTokenizer


def fast_tokenizer(name: str, tokenizer: Any) -> FastTokenizer:
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:
        raise InputError(f"the tokenizer of the teacher {name} has no fast version: save it as tokenizer.json")
    prefix, suffix = tokenizer.bos_token_id, None
    if prefix is None:
        prefix, suffix = tokenizer.cls_token_id, tokenizer.sep_token_id
    return FastTokenizer(fast, prefix_id=prefix, suffix_id=suffix, unk_id=tokenizer.unk_token_id)


def _model_class(transformers: Any, config: Any, gguf_file: str | None) -> Any:
    """Return the class with the head that the checkpoint has; AutoModel if it has none."""
    architecture = next(iter(config.architectures or ()), "")
    if gguf_file or architecture.endswith(("ForCausalLM", "LMHeadModel")):
        return transformers.AutoModelForCausalLM
    if architecture.endswith(("ForMaskedLM", "ForPreTraining")):
        return transformers.AutoModelForMaskedLM
    return transformers.AutoModel


def _check_weights(name: str, info: dict[str, Any], unused: tuple[str, ...]) -> None:
    """Raise an InputError if weights are missing or have the wrong shape; transformers would draw them at random."""
    missing = sorted(key for key in info["missing_keys"] if not any(part in key for part in unused))
    if missing:
        raise InputError(
            f"the teacher {name} lacks {len(missing)} of its weights, such as {missing[0]}: complete the download"
        )
    mismatched = sorted(info["mismatched_keys"])
    if mismatched:
        key, found, expected = mismatched[0]
        raise InputError(
            f"the teacher {name} cannot be loaded: {key} has the shape {list(found)}, and by its configuration "
            f"{list(expected)}: use the config.json that belongs to the weights"
        )
