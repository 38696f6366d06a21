"""Compile any PyTorch function of fixed sizes with this package, through the API of `torch_neuronx`.

    from transformers_neuronx import trace as torch_neuronx

    traced = torch_neuronx.trace(model, example_inputs)
    torch.jit.save(traced, "model.pt")

A process that loads it with `torch.jit.load` must import this package first. If `torch_neuronx` and a Neuron device
are present and NEURONX_RUNTIME is not set, the calls go to `torch_neuronx`.
"""

from transformers_neuronx.trace.buckets import BucketModelConfig as BucketModelConfig
from transformers_neuronx.trace.ranges import OutOfRangeError as OutOfRangeError
from transformers_neuronx.trace.tracing import (
    bucket_model_trace as bucket_model_trace,
    load as load,
    move_trace_to_device as move_trace_to_device,
    read_states as read_states,
    save as save,
    trace as trace,
)
