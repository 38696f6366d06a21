"""What queries are multiplied by in layers of Llama 4 that do not rotate. The rest of the forward pass is LLaMA's."""

from transformers_neuronx.layers import Step, grown
from transformers_neuronx.llama import graph
from transformers_neuronx.llama4text.config import Llama4TextConfig


def prepare(config: Llama4TextConfig, step: Step) -> graph.Rotations:
    """Return rotations by kind of layer. Where there is none, queries grow with their position, if they do."""
    rotations = graph.prepare(config, step)
    if not config.grows:
        return rotations
    grow = grown(step, config.growth, config.growth_each, ahead=1)
    return {kind: rotate or (grow, lambda k: k) for kind, rotate in rotations.items()}
