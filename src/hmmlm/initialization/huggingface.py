"""Teachers of Hugging Face: causal and masked language models, from a folder, a GGUF file or the hub."""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hmmlm.errors import InputError
from hmmlm.initialization.decoder import DecoderTeacher, check_vocabulary, layer_index
from hmmlm.initialization.llama import LlamaFiles, llama_folder, llama_gguf
from hmmlm.initialization.offsets import FastTokenizer

INSTALL = 'pip install "hmmlm[teacher]"'
_WEIGHTS = ("*.safetensors", "*.bin", "*.safetensors.index.json")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.txt", "vocab.json")
HUB_SECONDS = 10.0
"""To wait for the hub's first answer."""
_NO_STATES = ("pooler", "lm_head", "cls.", "embed_out", "position_ids")
"""Parts of a network that its hidden states do not pass through."""


class HuggingFaceTeacher:
    """A network of transformers as a `Teacher`; `model` is the whole of it, its head included where it has one."""

    def __init__(self, name: str, model: Any, tokenizer: FastTokenizer, device: torch.device) -> None:
        self.name, self.device, self.tokenizer = name, device, tokenizer
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model = model.to(device=device, dtype=dtype).eval().requires_grad_(False)
        self.model.config.use_cache = False
        config = self.model.config.get_text_config()
        self.hidden_size, self.layers = int(config.hidden_size), int(config.num_hidden_layers)
        self.context = int(getattr(config, "max_position_embeddings", None) or 1 << 31)  # recurrent ones have no limit
        self.vocab_size = self.model.get_input_embeddings().weight.shape[0]
        check_vocabulary(name, tokenizer, self.vocab_size)

    @torch.no_grad()
    def embed(self, tokens: Tensor, layer: int = -1) -> Tensor:
        layer = layer_index(layer, self.layers)
        known = tokens >= 0
        mask = None if bool(known.all()) else known.long().to(self.device)  # without one, attention is faster
        last = layer == self.layers
        result = self.model.base_model(
            input_ids=tokens.clamp(min=0).to(self.device), attention_mask=mask, output_hidden_states=not last
        )
        states: Tensor = result.last_hidden_state if last else result.hidden_states[layer]
        return states

    def head(self) -> Tensor:
        head = self.model.get_output_embeddings() or self.model.get_input_embeddings()
        weight: Tensor = head.weight
        return weight


def open_huggingface(
    name: str, *, random: bool, gguf_file: str | None, device: torch.device, seed: int
) -> HuggingFaceTeacher | DecoderTeacher:
    """See `open_teacher`. What is wrong with the files is said before anything large is read.

    Llamas on the disk are read by `llama`, all others by transformers.
    """
    source, gguf_file = _find(name, gguf_file, random)
    arguments: dict[str, Any] = {} if gguf_file is None else {"gguf_file": gguf_file}
    llama = _find_llama(Path(source), gguf_file)
    if llama is not None:
        tokenizer = llama.tokenizer
        if tokenizer is None:
            transformers = _import_packages("transformers")
            tokenizer = _tokenizer(name, _read(name, transformers.AutoTokenizer, source, **arguments))
        return llama.open(name, tokenizer, random, device, seed)
    transformers = _import_packages("transformers", *(["gguf", "accelerate"] if gguf_file else []))
    if not Path(source).is_dir():
        arguments |= _reach(source, gguf_file or "config.json")
    with _quiet(transformers):
        config = _read(name, transformers.AutoConfig, source, **arguments)
        if config.is_encoder_decoder:
            raise InputError(f"the teacher {name} is an encoder-decoder: use a causal or a masked language model")
        tokenizer = _tokenizer(name, _read(name, transformers.AutoTokenizer, source, **arguments))
        kind = _class(transformers, config, gguf_file)
        if random:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model = kind.from_config(config, dtype=torch.float32)
        else:
            model, info = _read(
                name, kind, source, dtype=torch.float32, output_loading_info=True, **arguments
            )  # fmt: skip
            missing = sorted(key for key in info["missing_keys"] if not any(part in key for part in _NO_STATES))
            if missing:
                raise InputError(f"the teacher {name} lacks {len(missing)} of its weights, such as {missing[0]}")
    return HuggingFaceTeacher(name, model, tokenizer, device)


def _find(name: str, gguf_file: str | None, random: bool) -> tuple[str, str | None]:
    """The folder or hub name, and the GGUF file in it if it is one; checks what can be seen without transformers."""
    path = Path(name)
    if gguf_file is None and path.suffix == ".gguf" and (path.is_file() or not path.parent.is_dir()):
        name, gguf_file = str(path.parent), path.name
        path = path.parent
    if not path.is_dir():
        if path.is_absolute() or name.startswith(".") or name.count("/") > 1 or path.exists():
            raise InputError(f"no teacher at {name}: it should be a folder, a .gguf file or a name on the hub")
        return name, gguf_file
    if gguf_file is not None:
        if not (path / gguf_file).is_file():
            raise InputError(f"no file {gguf_file} in the teacher folder {path}")
        return name, gguf_file
    ggufs = sorted(path.glob("*.gguf"))
    if not (path / "config.json").exists():
        hint = f"give the file, {ggufs[0]}" if ggufs else "it should hold config.json, weights and a tokenizer"
        raise InputError(f"the teacher folder {path} has no config.json: {hint}")
    _refuse_run(path)
    if not random and not any(next(path.glob(pattern), None) for pattern in _WEIGHTS):
        raise InputError(
            f"the teacher folder {path} has no weights (*.safetensors or *.bin): complete the download, "
            "or use a random teacher of its shape"
        )
    if not any((path / file).exists() for file in _TOKENIZERS):
        raise InputError(f"the teacher folder {path} has no tokenizer ({', '.join(_TOKENIZERS)}): put it there")
    return name, None


def _refuse_run(path: Path) -> None:
    """An InputError if the folder is of a run of ours, from which there is no teacher to be had (yet)."""
    try:
        fields = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return  # others say better what is wrong with it
    if not isinstance(fields, dict) or not {"data", "tokenizer", "train"} <= fields.keys():
        return
    if "optimizer" in fields:
        raise InputError(f"{path} is a run of `hmmlm train`, whose model cannot teach: give one of `hmmlm teacher`")
    if "kind" in fields.get("model", {}):
        raise InputError(f"{path} is a run of `hmmlm baseline`, whose model cannot teach: give one of `hmmlm teacher`")
    raise InputError(f"the teacher in {path} has no validated weights yet: go on with `hmmlm teacher --resume {path}`")


def _reach(name: str, file: str) -> dict[str, Any]:
    """How to read what is on the hub: from the cache alone if the hub does not answer. Asked once, where transformers
    would try for half a minute."""
    hub = _import_packages("huggingface_hub")
    try:
        hub.model_info(name, timeout=HUB_SECONDS)
        return {}
    except Exception as error:  # of the hub's client, or of the HTTP library under it: no common class
        possible = not isinstance(error, ValueError)  # as a name on the hub
        if possible and isinstance(hub.try_to_load_from_cache(name, file), str):
            return {"local_files_only": True}
        status = getattr(getattr(error, "response", None), "status_code", None)
        said = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        reason = f"the hub does not give it (status {status})" if status else f"the hub cannot be asked ({said})"
        raise InputError(
            f"no teacher {name}: it is no folder, not in the hub's cache, and {reason}: check the name, or download it"
        ) from error


def _find_llama(folder: Path, gguf_file: str | None) -> LlamaFiles | None:
    if not folder.is_dir():
        return None
    if gguf_file is None:
        return llama_folder(folder)
    _import_packages("gguf")
    return llama_gguf(folder / gguf_file)


def _import_packages(*packages: str) -> Any:
    """The first of them."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise InputError(f"this teacher needs the package {package}, which is not installed: {INSTALL}")
    return importlib.import_module(packages[0])


class _quiet:
    """Without the progress bars and advice of transformers, which would break into ours."""

    def __init__(self, transformers: Any) -> None:
        self.logging = transformers.utils.logging

    def __enter__(self) -> None:
        self.level, self.bars = self.logging.get_verbosity(), self.logging.is_progress_bar_enabled()
        self.logging.set_verbosity_error()
        self.logging.disable_progress_bar()

    def __exit__(self, *raised: object) -> None:
        self.logging.set_verbosity(self.level)
        if self.bars:
            self.logging.enable_progress_bar()


def _read(name: str, kind: Any, source: str, **arguments: Any) -> Any:
    """`kind.from_pretrained`, whose many errors about bad or missing files become ours."""
    try:
        return kind.from_pretrained(source, **arguments)
    except Exception as error:  # of transformers, huggingface_hub, safetensors, tokenizers, gguf: no common class
        if isinstance(error, MemoryError) or "out of memory" in str(error):
            raise
        reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        raise InputError(f"the teacher {name} cannot be loaded: {reason}") from error


def _tokenizer(name: str, tokenizer: Any) -> FastTokenizer:
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:
        raise InputError(f"the tokenizer of the teacher {name} has no fast version (tokenizer.json): save it as one")
    before, after = tokenizer.bos_token_id, None
    if before is None:
        before, after = tokenizer.cls_token_id, tokenizer.sep_token_id
    return FastTokenizer(fast, before=before, after=after, unk_id=tokenizer.unk_token_id)


def _class(transformers: Any, config: Any, gguf_file: str | None) -> Any:
    """The class with the head that the weights come with; the bare network where they have none."""
    architecture = next(iter(config.architectures or ()), "")
    if gguf_file or architecture.endswith(("ForCausalLM", "LMHeadModel")):
        return transformers.AutoModelForCausalLM
    if architecture.endswith(("ForMaskedLM", "ForPreTraining")):
        return transformers.AutoModelForMaskedLM
    return transformers.AutoModel
