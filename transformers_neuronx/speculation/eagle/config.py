"""The fields of an EAGLE head's configuration that its graph and weights need."""

from dataclasses import dataclass
from typing import ClassVar

from transformers_neuronx.config import hf
from transformers_neuronx.engine.programs import LAST
from transformers_neuronx.layers import ACTIVATIONS
from transformers_neuronx.llama.like import LlamaLike


@dataclass(frozen=True)
class FirstConfig(LlamaLike):
    """A head of the first EAGLE, which reads what the model's own head is applied to."""

    activation: str = hf("hidden_act", among=ACTIVATIONS)
    attention_bias: bool = hf("attention_bias", False)
    qkv_bias: bool = hf("qkv_bias", False)
    mlp_bias: bool = hf("mlp_bias", False)
    combined_bias: bool | None = hf("bias", None)  # by default as its checkpoint has it

    tied = False
    norms: ClassVar = {"mlp_norm": "post_attention_layernorm"}
    FIXED: ClassVar = {"num_hidden_layers": 1}
    WITHOUT_EFFECT: ClassVar = frozenset({"pretraining_tp", "tie_word_embeddings"})

    @property
    def features(self) -> int:
        return self.hidden_size

    of_size = features  # of the model's hidden states

    def depths_in(self, layers: int) -> tuple[int, ...]:
        return (LAST,)


@dataclass(frozen=True)
class EagleConfig(LlamaLike):
    """A head of EAGLE-3, which reads hidden states of three depths."""

    activation: str = hf("hidden_act", among=ACTIVATIONS)
    attention_bias: bool = hf("attention_bias", False)
    mlp_bias: bool = hf("mlp_bias", False)
    drafted: int | None = hf("draft_vocab_size", None)  # tokens that it may draft
    target_size: int | None = hf("target_hidden_size", None)  # of the model's hidden states
    depths: list[int] | None = hf("eagle_aux_hidden_state_layer_ids", None)  # layers whose inputs it reads
    normed_residual: bool = hf("norm_before_residual", False)  # what attention adds to is the norm of the features
    norm_features: bool = hf("norm_before_fc", False)  # all hidden states have a norm of their own

    tied = False
    norms: ClassVar = {
        "attn_norm": "input_layernorm", "features_norm": "hidden_norm", "mlp_norm": "post_attention_layernorm",
    }  # fmt: skip
    FIXED: ClassVar = {"num_hidden_layers": 1, "norm_output": False, "fc_norm": False, "use_aux_hidden_state": True}
    WITHOUT_EFFECT: ClassVar = frozenset({"pretraining_tp", "tie_word_embeddings"})

    @property
    def features(self) -> int:
        """Number of features of a token: those of all hidden states that it reads."""
        return len(self.depths or range(3)) * self.of_size

    @property
    def of_size(self) -> int:
        """Size of the model's hidden states."""
        return self.target_size or self.hidden_size

    def depths_in(self, layers: int) -> tuple[int, ...]:
        """The layers whose inputs it reads, of a model with so many."""
        return tuple(self.depths or (2, layers // 2, layers - 3))
