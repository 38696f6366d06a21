"""Weights: from files of a checkpoint to shards on devices. What families write their tables with is imported here."""

from transformers_neuronx.weights.layouts import (
    Layout as Layout,
    as_is as as_is,
    flattened as flattened,
    for_each_head as for_each_head,
    in_turns as in_turns,
    inputs_flattened as inputs_flattened,
    pairs_as_halves as pairs_as_halves,
    part as part,
    part_per_head as part_per_head,
    plus_one as plus_one,
    section as section,
    section_per_head as section_per_head,
    taps as taps,
    transposed as transposed,
)
from transformers_neuronx.weights.rows import (
    COLUMNS as COLUMNS,
    ROWS as ROWS,
    Weight as Weight,
    also_named as also_named,
    attention as attention,
    bias_of as bias_of,
    experts as experts,
    linear as linear,
    mlp as mlp,
    norm as norm,
    of_kinds as of_kinds,
    parts_of as parts_of,
    renamed as renamed,
)
from transformers_neuronx.weights.splits import (
    Heads as Heads,
)
