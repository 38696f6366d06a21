"""Two models side by side: where their logits part and by how much, which layer is to blame, and which weight."""

from transformers_neuronx.comparison.measure import TOLERANCE as TOLERANCE, compare as compare
from transformers_neuronx.comparison.report import (
    Changed as Changed,
    Comparison as Comparison,
    Part as Part,
    Place as Place,
)
