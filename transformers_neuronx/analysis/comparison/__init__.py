"""Compare two models: where and how much their logits differ, and which layer and which weight is to blame."""

from transformers_neuronx.analysis.comparison.measure import TOLERANCE as TOLERANCE, compare as compare
from transformers_neuronx.analysis.comparison.report import (
    Changed as Changed,
    Comparison as Comparison,
    Part as Part,
    Place as Place,
)
