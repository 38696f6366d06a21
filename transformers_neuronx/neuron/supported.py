"""Public knowledge of what `neuronx-cc` accepts, as tables: operations, element types, custom calls.

Codes are those of the "Neuron Compiler Error Codes" in AWS's documentation of Neuron (compiler/error-codes).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

# "Supported Operators" in the release notes of neuronx-cc (release-notes/components/compiler), as HLO names them.
PUBLISHED = frozenset(
    """
    abs add all-gather all-reduce atan2 batch-norm-grad batch-norm-inference batch-norm-training bitcast-convert
    broadcast ceil clamp compare concatenate constant convert cosine custom-call divide dot dynamic-update-slice
    exponential floor gather get-tuple-element iota log and not maximum minimum multiply negate pad parameter power
    reduce reshape reverse rng rng-bit-generator rsqrt scatter select select-and-scatter shift-right-logical sign sine
    slice sqrt subtract tanh transpose tuple
    """.split()
)
# Other operations that the original library wrote in programs that ran on Neuron (its pyhlo and hlo.py).
WRITTEN = frozenset(
    """
    all-to-all convolution copy logistic or reduce-scatter reduce-window remainder replica-id sort
    """.split()
)
# In neither table, but reported elsewhere to compile: JAX's random bits (Threefry), collectives that the guide to JAX
# on Neuron lists (neuron-envvars), and the shift of NCC_EVRF022 for 32 bits.
REPORTED = frozenset("collective-permute partition-id shift-left shift-right-arithmetic xor".split())
TAKEN = PUBLISHED | WRITTEN | REPORTED


class Refusal(NamedTuple):
    """Why something is refused: a short name of the rule, what is wrong, what to write instead, and the code."""

    rule: str
    message: str
    advice: str
    code: str = ""


OPERATION, UNKNOWN, FLOW = "unsupported operation", "unknown operation", "control flow"
_NO = "NCC_EVRF001"  # an unsupported operator was used
_SORT = "Take the largest with the custom call AwsNeuronTopK"


def _instead(advice: str) -> Refusal:
    return Refusal(OPERATION, "is not supported", advice, _NO)


# Operations that are in no table, with what to write instead.
REFUSED: Mapping[str, Refusal] = {
    "while": Refusal(FLOW, "loops are not supported", "Write the rounds one after the other, or loop on the host", _NO),
    "conditional": Refusal(FLOW, "branches are not supported", "Compute both sides, and select one", _NO),
    "call": Refusal(FLOW, "calls are not supported", "Write the computation where it is called", _NO),
    "map": Refusal(FLOW, "calls are not supported", "Apply the operations to whole arrays", _NO),
    "topk": _instead(_SORT),
    "dynamic-slice": _instead("Gather the positions (hlo.gather_rows, hlo.take), or slice where the start is known"),
    "erf": _instead("Use the custom call AwsNeuronErf"),
    "is-finite": _instead("Write abs(x) < inf"),
    "log-plus-one": _instead("Write log(1 + x)"),
    "exponential-minus-one": _instead("Write exp(x) - 1"),
    "tan": _instead("Write sin(x) / cos(x)"),
    "cbrt": _instead("Write sign(x) * exp(log(abs(x)) / 3)"),
    "round-nearest-even": _instead("Write floor(x + 0.5), which rounds halves up"),
    "round-nearest-afz": _instead("Write sign(x) * floor(abs(x) + 0.5)"),
    "reduce-precision": _instead("Convert to the narrower type and back"),
    "popcnt": _instead("Add up the bits, by shifts and masks"),
    "count-leading-zeros": _instead("Compare with powers of two, and add up the results"),
    "bitcast": _instead("Write a reshape, or a bitcast-convert where the type changes"),
    "opt-barrier": _instead("Leave it out: it computes nothing"),
}
# For targets without an operation that sorts.
UNSORTED = Refusal(OPERATION, "is not supported", _SORT, "NCC_EVRF029")

# Data types of each NeuronCore (about-neuron/arch/neuron-features/data-types), and others that the original wrote.
TYPES = frozenset("pred s8 s16 s32 u8 u16 u32 f16 bf16 f32".split())
# For targets with 8-bit floats. f8e4m3fn is not among them: Trainium2 treats it as f8e4m3 if it is asked to
# (NCC_EVRF051), whose largest number is 240 and not 448.
FLOAT8 = frozenset("f8e4m3 f8e5m2".split())
# XLA's numbers of types that PyHLO does not write, but other modules may have.
FOREIGN_TYPES: Mapping[int, str] = {
    23: "f8e4m3b11fnuz",
    24: "f8e5m2fnuz",
    25: "f8e4m3fnuz",
    28: "f8e4m3",
    29: "f8e3m4",
}

_TYPE, _FLOAT8 = "is not a type of this target", "Store it as s8, bf16 or f16"
_COMPLEX = Refusal("element type", _TYPE, "Keep real and imaginary parts as two arrays", "NCC_EVRF004")
_NUZ = Refusal("element type", _TYPE, _FLOAT8, "NCC_EVRF005")
_NARROW8 = Refusal("element type", _TYPE, _FLOAT8, "NCC_ESPP047")
_LONG = Refusal("64-bit integers", "loses its upper 32 bits", "Use s32 or u32", "NCC_ESFH002")
TYPE_REFUSED: Mapping[str, Refusal] = {
    "f64": Refusal("element type", _TYPE, "Use f32", "NCC_ESPP004"),
    "c64": _COMPLEX,
    "c128": _COMPLEX,
    "s64": _LONG,
    "u64": _LONG,
    "s4": Refusal("element type", _TYPE, "Use s8, or two numbers in a u8", "NCC_ESPP004"),
    "u4": Refusal("element type", _TYPE, "Use u8, or two numbers in one", "NCC_ESPP004"),
    **dict.fromkeys(("f8e4m3", "f8e4m3fn", "f8e5m2", "f8e3m4"), _NARROW8),
    **dict.fromkeys(("f8e4m3b11fnuz", "f8e5m2fnuz", "f8e4m3fnuz"), _NUZ),
}
ANY_TYPE = Refusal("element type", _TYPE, f"Use one of {', '.join(sorted(TYPES))}", "NCC_ESPP004")

# Targets of custom calls, as listed by NCC_EVRF015 and NCC_EHCA005.
CUSTOM_CALLS = frozenset(
    """
    AwsNeuronErf AwsNeuronGelu AwsNeuronGeluApprxTanh AwsNeuronGeluBackward AwsNeuronSilu AwsNeuronSiluBackward
    AwsNeuronRmsNorm AwsNeuronSoftmax AwsNeuronSoftmaxBackward AwsNeuronCollectiveMatmul AwsNeuronIntMatmult
    AwsNeuronArgMax AwsNeuronArgMin AwsNeuronTopK AwsNeuronDropoutMaskV1 AwsNeuronCustomNativeKernel AwsNeuronCustomOp
    AwsNeuronDevicePrint ResizeNearest ResizeBilinear ResizeNearestGrad AwsNeuronLNCShardingConstraint
    AwsNeuronTransferWithStaticRing AwsNeuronModuleMarkerStart-Forward AwsNeuronModuleMarkerStart-Backward
    AwsNeuronModuleMarkerEnd-Forward AwsNeuronModuleMarkerEnd-Backward NeuronBoundaryMarker-Start
    NeuronBoundaryMarker-End
    """.split()
)


class Signature(NamedTuple):
    """The types that a custom call takes as its one operand, and the number that is its backend_config."""

    types: frozenset[str]
    number: str
    code: str = ""


# As the original wrote them. The types of the first are also in NCC_EVRF013.
SIGNATURES: Mapping[str, Signature] = {
    "AwsNeuronTopK": Signature(frozenset({"f32", "f16", "bf16"}), "k", "NCC_EVRF013"),
    "AwsNeuronArgMax": Signature(frozenset({"f16", "bf16", "f32", "s32", "u32"}), "axis"),
}

# Operations of the table of operators that a reduction may combine by.
COMBINERS = frozenset("add maximum minimum multiply".split())

# Computed in f32, which is exact for integers only up to 2^24. By default, this gives a warning up to Neuron 2.32, and
# is refused in later versions (--implicit-integer-downcast). Older chips multiply matrices of integers.
INTEGERS_IN_F32: Mapping[str, str] = {
    "dot": "NCC_EVRF035",
    "all-reduce": "NCC_EVRF061",
    "reduce-scatter": "NCC_EVRF063",
}
INTEGER_DOTS = frozenset({"trn1", "inf2"})

LARGEST = 1 << 32  # bytes of an array: NCC_EVRF024
MOST = 16384  # the largest k of AwsNeuronTopK: NCC_EVRF014, from an answer to issue 1339 of aws-neuron-sdk
