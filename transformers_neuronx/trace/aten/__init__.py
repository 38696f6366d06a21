"""Lower each core ATen operation to HLO, with a table: `TABLE[operation](out, *operands)`. See `table`."""

from transformers_neuronx.trace.aten import (
    elementwise as elementwise,
    indexing as indexing,
    pooling as pooling,
    reduction as reduction,
    shaping as shaping,
)
from transformers_neuronx.trace.aten.products import MULTIPLIED as MULTIPLIED, parameter as parameter
from transformers_neuronx.trace.aten.refused import refused as refused
from transformers_neuronx.trace.aten.table import TABLE as TABLE, element_type_of as element_type_of
