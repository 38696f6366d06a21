"""One module with a program for each of several input sizes, and shared weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from transformers_neuronx.errors import GraphError
from transformers_neuronx.trace.lowering import Region
from transformers_neuronx.trace.origin import summary
from transformers_neuronx.trace.script import quiet

Kwargs = Mapping[str, Any]


@dataclass(frozen=True)
class BucketModelConfig:
    """How inputs are assigned to buckets.

    `bucket_kernel()` returns a scripted function. It takes a list of tensors and `bucket_kernel_constant_args`, and
    returns a list of tensors of a bucket's sizes and a tensor with the bucket's number.
    `shared_state_buffer` has the states that all buckets share, in the largest sizes.
    `shared_state_buffer_preprocessor()` returns a scripted function. It takes the sizes of each bucket's states, these
    tensors and a bucket's number, and returns the slices of the tensors that are that bucket's states.
    `func_kwargs` are keyword arguments for the function that makes the models: one dictionary, or one per bucket.
    """

    bucket_kernel: Callable[[], Callable[..., Any]]
    bucket_kernel_constant_args: Sequence[Any] = ()
    shared_state_buffer: Sequence[torch.Tensor] | None = None
    shared_state_buffer_preprocessor: Callable[[], Callable[..., Any]] | None = None
    func_kwargs: Kwargs | Sequence[Kwargs] | None = None

    def kwargs(self, bucket: int) -> Kwargs:
        """Return the keyword arguments of one bucket's model."""
        if self.func_kwargs is None or isinstance(self.func_kwargs, Mapping):
            return self.func_kwargs or {}
        return self.func_kwargs[bucket]


def check_buckets(config: Any, example_inputs: Any) -> None:
    """Raise GraphError unless these are a configuration and a list of example inputs."""
    if not isinstance(config, BucketModelConfig):
        raise GraphError(f"bucket_config must be a BucketModelConfig, got {type(config).__name__}")
    if not isinstance(example_inputs, list | tuple) or not example_inputs:
        kind = "none" if isinstance(example_inputs, list | tuple) else type(example_inputs).__name__
        raise GraphError(f"example_inputs must be a list with the example inputs of each bucket, got {kind}")


def model_of(func: Callable[..., Any], config: BucketModelConfig, bucket: int) -> tuple[Any, Any]:
    """Return the model and the states that `func` makes for a bucket."""
    made = func(**config.kwargs(bucket))
    if not isinstance(made, tuple | list) or len(made) != 2:
        raise GraphError(
            "the function that makes the models must return a pair of a model and its input_output_aliases, got "
            f"{type(made).__name__}: return model, {{}}"
        )
    return made[0], made[1]


def kernel_of(config: BucketModelConfig) -> Any:
    """Return the scripted function that selects the bucket."""
    scripted: Any = (torch.jit.ScriptFunction, torch.jit.ScriptModule)
    if isinstance(config.bucket_kernel, scripted):
        raise GraphError("bucket_kernel must be a function that returns a scripted function, got a scripted function")
    kernel = config.bucket_kernel()
    if isinstance(kernel, scripted):
        return kernel
    try:
        with quiet():
            return torch.jit.script(kernel)
    except Exception as error:
        raise GraphError(
            f"bucket_kernel must return a function that torch.jit.script accepts, got {type(kernel).__name__}: "
            f"{summary(error)}"
        ) from error


def regions_of(config: BucketModelConfig, states: Sequence[Sequence[torch.Tensor]]) -> list[list[Region]]:
    """Return, for each bucket, its states as regions of larger tensors."""
    if config.shared_state_buffer is None:
        return [[whole(state) for state in bucket] for bucket in states]
    buffer = list(config.shared_state_buffer)
    if wrong := [len(bucket) for bucket in states if len(bucket) != len(buffer)]:
        raise GraphError(f"a bucket must have the {len(buffer)} states of shared_state_buffer, got {wrong[0]} states")
    if config.shared_state_buffer_preprocessor is None:
        parts = [buffer for _ in states]
    else:
        process, sizes = config.shared_state_buffer_preprocessor(), [[list(s.shape) for s in b] for b in states]
        parts = [process(sizes, buffer, torch.tensor([number])) for number in range(len(states))]
    found = []
    for bucket, views in zip(states, parts, strict=True):
        for state, view in zip(bucket, views, strict=True):
            if state.shape != view.shape or state.dtype != view.dtype:
                want, got = (f"{each.dtype}{list(each.shape)}" for each in (state, view))
                raise GraphError(
                    f"a bucket's state must be {want}, got {got} from shared_state_buffer: slice it in "
                    "shared_state_buffer_preprocessor"
                )
        found.append([_region(view, tensor) for view, tensor in zip(views, buffer, strict=True)])
    return found


def whole(state: torch.Tensor) -> Region:
    """Return the region that is all of a tensor."""
    return Region(tuple(state.shape), (0,) * state.ndim)


def _region(view: torch.Tensor, tensor: torch.Tensor) -> Region:
    """Return the region of a tensor that a sliced view is."""
    shared = view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    if not shared or view.stride() != tensor.stride():
        raise GraphError(
            "shared_state_buffer_preprocessor must return slices of the states without steps, because programs read "
            "and write the states in place"
        )
    offset, starts = int(view.storage_offset() - tensor.storage_offset()), []
    for step in tensor.stride():
        start, offset = divmod(offset, step)
        starts.append(start)
    return Region(tuple(tensor.shape), tuple(starts))
