"""Constants of the original's configurations."""

from enum import StrEnum

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
