"""Constants of the original's configurations."""

from enum import StrEnum

TILE_SIZE = 128  # rows and columns of a matrix multiplication on a NeuronCore
FUSED_QKV_TP_FACTOR = 3  # matrices in a fused projection of queries, keys and values
KV_SHARD_PAD = 128  # positions that the original added when it divided caches by positions
TRN1_WORLD_SIZE = 32  # NeuronCores of a trn1.32xlarge

LAYOUT_BSH = "BSH"
LAYOUT_HSB = "HSB"
LAYOUT_SBH = "SBH"


class Layout(StrEnum):
    """The order of the axes batch, sequence and hidden."""

    HSB = LAYOUT_HSB
    BSH = LAYOUT_BSH
    SBH = LAYOUT_SBH


class GQA(StrEnum):
    """How shared heads of keys and values are placed on devices."""

    SHARD_OVER_HEADS = "shard-over-heads"
    SHARD_OVER_BATCH = "shard-over-batch"
    REPLICATED_HEADS = "replicated-heads"
    ALL_GATHER_HEADS = "all-gather-heads"


class FpBounds:
    """The largest numbers of Neuron's 8-bit floats."""

    min = -240.0
    max = 240.0
