"""Granites whose layers have windows, a rotation of their own or none, and attention sinks."""

from transformers_neuronx.errors import ConfigError
from transformers_neuronx.layers import Rotary
from transformers_neuronx.llama import weights
from transformers_neuronx.llama.scaled import ScaledLike
from transformers_neuronx.weights import Weight

PREFIX, ignored = weights.PREFIX, weights.ignored


class BasesLike(ScaledLike):
    """A layer has a window or none, and rotates by a base of its own, or not at all if that is 0."""

    kinds: list[str]
    bases: list[float]

    @property
    def layer_kinds(self) -> list[str]:
        """Whether each layer has a window, and the base of its rotation."""
        if len(self.bases) != len(self.kinds):
            raise ConfigError(f"layer_rope_theta must have {len(self.kinds)} bases, one a layer, got {len(self.bases)}")
        return [f"{kind} {float(base)}" for kind, base in zip(self.kinds, self.bases, strict=True)]

    def window_of(self, kind: str) -> int | None:
        return super().window_of(kind.partition(" ")[0])

    def rotary_of(self, kind: str) -> Rotary | None:
        base = float(kind.partition(" ")[2])
        return self.rotary_with({**self.rope, "rope_theta": base}) if base else None


def table(config: BasesLike) -> list[Weight]:
    """LLaMA's, with a sink of each head."""
    heads, name = config.attention_heads, f"{weights.BLOCK}self_attn.sinks"
    sinks = Weight("attn.sinks", name, (heads.heads,), split=heads.split(0, unit=1), dtype="f32")
    return [sinks, *weights.table(config)]
