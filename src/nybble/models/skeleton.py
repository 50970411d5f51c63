"""A transformers model without memory for its weights, and filling it tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from nybble.errors import BadInput, Unsupported


def skeleton(config: Any, dtype: torch.dtype) -> nn.Module:
    """The causal language model of a transformers configuration, its parameters on the meta device.

    Buffers are computed as usual (rotary frequencies are no weights and stand in no file).

    Raises:
        Unsupported: transformers has no causal language model for this configuration.
    """
    from transformers import AutoModelForCausalLM

    try:
        with _parameters_on_meta():
            return AutoModelForCausalLM.from_config(config, dtype=dtype)
    except ValueError as error:
        raise Unsupported(f"transformers has no causal language model for {config.model_type!r}: {error}") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' progress bars and reports from the terminal; what they say is raised as errors here."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters lose their memory as they are registered, before anything is written to them."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta":
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    patched: Any = nn.Module
    patched.register_parameter = register_on_meta
    try:
        yield
    finally:
        patched.register_parameter = register


def fill(
    model: nn.Module, tensors: Mapping[str, Callable[[], Tensor]], source: str, device: torch.device | str = "cpu"
) -> None:
    """Give parameters and persistent buffers their values, one tensor at a time, each cast to the model's dtype.

    Args:
        model: a skeleton; tied parameters are tied again at the end.
        tensors: parameter name -> what reads it.
        source: what to call the model in an error.
        device: where each goes as soon as it is read.

    Raises:
        BadInput: a shape that does not fit, or a parameter that got no value.
    """
    for name, read in tensors.items():
        module_name, _, leaf = name.rpartition(".")
        module = model.get_submodule(module_name)
        old, value = getattr(module, leaf), read()
        if value.shape != old.shape:
            raise BadInput(f"{source}: {name} is {tuple(value.shape)}, the model expects {tuple(old.shape)}")
        value = value.to(device, old.dtype)
        if isinstance(old, nn.Parameter):
            setattr(module, leaf, nn.Parameter(value, requires_grad=old.requires_grad))
        else:
            module.register_buffer(leaf, value)
    tie: Any = getattr(model, "tie_weights", None)
    if tie is not None:
        tie()
    empty = [name for name, parameter in model.named_parameters() if parameter.device.type == "meta"]
    if empty:
        raise BadInput(f"{source}: {len(empty)} weights are missing, first: {empty[0]}")
