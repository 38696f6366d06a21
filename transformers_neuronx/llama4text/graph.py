"""What queries are multiplied by in layers of Llama 4 that do not rotate. The rest of the forward pass is LLaMA's."""

from transformers_neuronx import hlo
from transformers_neuronx.layers import Step
from transformers_neuronx.llama import graph
from transformers_neuronx.llama4text.config import Llama4TextConfig
from transformers_neuronx.pyhlo import Tensor


def prepare(config: Llama4TextConfig, step: Step) -> graph.Rotations:
    """Return rotations by kind of layer. Where there is none, queries grow with their position, if they do.

    They are multiplied by 1 + growth ln(1 + ⌊(position + 1) / each⌋) (Nakanishi, arXiv:2501.19399).
    """
    rotations = graph.prepare(config, step)
    if not config.grows:
        return rotations
    times = hlo.log(hlo.convert(hlo.divide(step.positions + 1, config.growth_each), "f32") + 1.0) * config.growth + 1.0
    factor = hlo.reshape(times, *times.sizes, 1, 1)  # [b, n, 1, 1]

    def grown(q: Tensor) -> Tensor:
        return hlo.convert(hlo.convert(q, "f32") * factor, q.dtype)

    return {kind: rotate or (grown, lambda k: k) for kind, rotate in rotations.items()}
