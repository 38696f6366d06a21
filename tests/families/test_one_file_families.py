"""The logits of the families in one file against Transformers'."""

import pytest
from one_file import FAMILIES, tiny
from parity import assert_close, continued, prompts, randomized
from safetensors.torch import load_file, save_file

from transformers_neuronx.config import completed
from transformers_neuronx.errors import ConfigError
from transformers_neuronx.huggingface.auto import family_of

CASES = [(model_type, variant) for model_type, (_, variants) in FAMILIES.items() for variant in variants]


@pytest.mark.parametrize("degree", [1, 3])
@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.few(18)
def test_logits_are_those_of_transformers(model_type, degree, parity):
    parity(family_of(model_type), tiny(model_type), degree=degree, n_positions=[48])


@pytest.mark.slow
@pytest.mark.parametrize("degree", [1, 3])
@pytest.mark.parametrize(("model_type", "variant"), CASES)
def test_variants(model_type, variant, degree, parity):
    parity(family_of(model_type), tiny(model_type, variant), degree=degree)


@pytest.mark.slow
@pytest.mark.parametrize("degree", [2, 8])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_at_other_degrees(model_type, degree, parity):
    parity(family_of(model_type), tiny(model_type), degree=degree)


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_in_bf16(model_type, degree, parity):
    config = tiny(model_type)
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    if experts:
        # Every expert for every token: otherwise rounding decides which of two almost equal experts a token goes to.
        # A few tokens still have errors that are ten times as large as those of others, here and in Transformers.
        config.num_experts_per_tok = experts
    parity(family_of(model_type), config, degree=degree, amp="bf16", largest=not experts)


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("falcon", dict(alibi=True), "the falcon configuration has alibi=True; supported: False"),
        ("codegen", dict(n_head=6), "the codegen configuration needs a multiple of 4 as n_head, got 6"),
        ("gpt_neo", dict(attention_layers=["global", "other"]), r"attention_layers=\['global', 'other'\]; supported"),
        (
            "mpt",
            dict(attn_config=dict(qk_ln=True)),
            "attn_config of the mpt configuration has qk_ln=True; supported: F",
        ),
        ("mpt", dict(attn_config=dict(alibi=False)), "the mpt configuration has alibi=False; supported: True"),
        ("deepseek_v2", dict(norm_topk_prob=True), "deepseek_v2 configuration has norm_topk_prob=True; supported: F"),
        (
            "deepseek_v2",
            dict(topk_method="group_limited_greedy", n_group=7, topk_group=1),
            "deepseek_v2 configuration needs num_experts_per_tok of at most 1, the experts of its best groups, got 2",
        ),
        ("mistral4", dict(n_group=5, topk_group=1), "mistral4 configuration needs num_experts_per_tok of at most 1"),
        ("glm4_moe_lite", dict(first_k_dense_replace=2), "has first_k_dense_replace=2; supported: 1"),
        ("kolibri1", dict(sliding_window=None), "the kolibri1 configuration lacks 'sliding_window'"),
        ("hy_v3", dict(first_k_dense_replace=2), "has first_k_dense_replace=2; supported: 1"),
        (
            "cohere2_moe",
            dict(rope_scaling=dict(rope_type="linear", factor=2.0)),
            "has rope_scaling=.*; supported: None",
        ),
        ("mpt", dict(expansion_ratio=2), "the mpt configuration has expansion_ratio=2; supported: 4"),
    ],
)
def test_what_is_not_supported_is_refused(model_type, changes, message):
    attributes = completed(tiny(model_type).to_dict())
    attributes.update(changes)
    with pytest.raises(ConfigError, match=message):
        family_of(model_type).family.read_config(attributes)


@pytest.mark.parametrize("name", ["post_mlp_layernorm", "mlp.post_mlp_layernorm"])
def test_ax_k1_without_a_correction_of_scores(name, tmp_path):
    reference, file = randomized(tiny("axk1")), tmp_path / "model.safetensors"
    for buffer in (buffer for name, buffer in reference.named_buffers() if name.endswith("correction_bias")):
        buffer.zero_()
    reference.save_pretrained(tmp_path)
    kept = {full: tensor for full, tensor in load_file(file).items() if not full.endswith("correction_bias")}
    save_file({full.replace("post_mlp_layernorm", name): tensor for full, tensor in kept.items()}, file)
    model = family_of("axk1").from_pretrained(tmp_path, n_positions=[24])
    model.to_neuron()
    [row] = prompts(131, [20])
    assert_close(model.forward([row], output_all_logits=True)[0], continued(reference, row, []))
