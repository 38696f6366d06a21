"""A stand-in for AWS's package, for tests: it compiles nothing."""

from libneuronxla.neuron_cc_wrapper import neuron_xla_compile as neuron_xla_compile
