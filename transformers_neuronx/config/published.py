"""How quantized checkpoints are published, as their configurations say.

These are read: compressed-tensors with whole numbers of 4 or 8 bits, FP8, MXFP4 or NVFP4; the FP8 of Qwen, DeepSeek and
others, with a scale for each block of a matrix; GPTQ and AWQ; nf4 and fp4 of bitsandbytes; what torchao has in 8 bits;
experts in MXFP4, as gpt-oss has them; and files of GGUF, where each matrix has its own type. What they say of
activations is not followed: these stay in the model's type.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from transformers_neuronx.config.gguf import GGUF, storage

QUANTIZATION = "quantization_config"  # the attribute of a configuration
CONV1D = re.compile(r"(.*\.)?(c_attn|c_proj|c_fc)\.weight")  # matrices of GPT-2 that are [in, out]
CODED = {"mxfp4-pack-quantized": ("mxfp4", "group"), "nvfp4-pack-quantized": ("nvfp4", "tensor_group")}
EXPERTS = ".mlp.experts."  # in the names of what is in MXFP4 in gpt-oss
MX = 32  # numbers of MXFP4 with a scale
WHOLE = 128  # inputs of a group where all inputs share a scale, and numbers are stored in groups
BLOCK = 64  # of bitsandbytes: numbers with a scale; its files may have a multiple
OF_TORCHAO = {  # its configurations, and the type of their weights
    "Int8WeightOnlyConfig": "s8", "Int8DynamicActivationInt8WeightConfig": "s8",
    "Float8WeightOnlyConfig": "f8e4m3fn", "Float8DynamicActivationFloat8WeightConfig": "f8e4m3fn",
}  # fmt: skip
TYPES: Mapping[tuple[str, Any], str] = {("int", 8): "s8", ("int", 4): "s4", ("float", 8): "f8e4m3fn"}


@dataclass(frozen=True)
class Form:
    """How matrices are stored: their type, and how many outputs and inputs share a scale; None means all.

    `ignored` are names of modules that are not quantized, or patterns of them after "re:". `packing` is how whole
    numbers are packed into words of 32 bits, if they are: as in "compressed", "gptq", "gptq_v2" or "awq"; or codes of
    four bits into bytes: as in "mxfp4", "nvfp4" or "bitsandbytes", or "experts", whose matrices are in one tensor of
    blocks. With "torchao", only names differ. With `zeros`,
    each group of inputs has a number that stands for zero. In words, matrices are by outputs, also those that are
    [in, out] otherwise, whose names `turned` matches. With `by_group`, inputs of a group need not be beside each other
    (act-order).
    """

    dtype: str
    block: tuple[int | None, int | None]
    ignored: tuple[str, ...]
    packing: str = ""
    zeros: bool = False
    turned: re.Pattern[str] | None = None
    by_group: bool = False

    @property
    def storage(self) -> str:
        """How a model stores such a matrix. Scales in f32 hold those of every type, and minima, exactly."""
        scales = "bf16" if self.packing in ("mxfp4", "experts") else "f32"
        group = self.block[1] or (WHOLE if self.zeros or self.dtype == "s4" else None)
        return storage(self.dtype, group, scales, self.zeros, by_group=self.by_group)

    def ignores(self, module: str) -> bool:
        """Whether a module is not quantized."""

        def meant(name: str) -> bool:
            if name.startswith("re:"):
                return re.match(name.removeprefix("re:"), module) is not None
            return f"{module}.".startswith(f"{name}.") or f".{module}".endswith(f".{name}")

        return any(map(meant, self.ignored))


@dataclass(frozen=True)
class Mixed:
    """The ggml type of each matrix of a checkpoint, by its name."""

    kinds: Mapping[str, str]


def form_of(attributes: Mapping[str, Any]) -> Form | Mixed | None:
    """Return the form of a configuration's weights; None if they are not quantized, or in a way that is not read."""
    how = attributes.get(QUANTIZATION)
    if not isinstance(how, Mapping):
        return None
    forms = {
        "compressed-tensors": _compressed,
        "fp8": _fp8,
        "gptq": _gptq,
        "awq": _awq,
        "bitsandbytes": _bitsandbytes,
        "torchao": _torchao,
        GGUF: _gguf,
    }
    if attributes.get("model_type") == "gpt_oss":
        forms["mxfp4"] = _mxfp4
    form = forms.get(str(how.get("quant_method")), lambda _: None)(how)
    if isinstance(form, Form) and attributes.get("model_type") == "gpt2":
        return replace(form, turned=CONV1D)
    return form


def _gguf(how: Mapping[str, Any]) -> Mixed | None:
    matrices = how.get("matrices")
    return Mixed(matrices) if isinstance(matrices, Mapping) else None


def _compressed(how: Mapping[str, Any]) -> Form | None:
    if how.get("format") in CODED:
        return _of_codes(how)
    groups = [group.get("weights") or {} for group in how.get("config_groups", {}).values()]
    sparse = (how.get("sparsity_config") or {}).get("format", "dense") != "dense"
    packed = how.get("format") == "pack-quantized"
    known = packed or how.get("format") in ("int-quantized", "float-quantized", "naive-quantized")
    if not groups or any(group != groups[0] for group in groups) or sparse or not known:
        return None
    weights, size = groups[0], groups[0].get("group_size")
    strategy = weights.get("strategy") or ("tensor" if size is None else "channel" if size < 0 else "group")
    blocks: dict[Any, tuple[int | None, int | None]] = dict(
        tensor=(None, None),
        channel=(1, None),
        group=(1, size),
        block=tuple(weights.get("block_structure") or (None, None)),
    )
    dtype, block = TYPES.get((str(weights.get("type")), weights.get("num_bits"))), blocks.get(strategy)
    zeros = not weights.get("symmetric", True)
    if dtype is None or block is None or (zeros or dtype == "s4") > (packed and block[0] == 1):
        return None
    by_group = packed and block[1] is not None and weights.get("actorder") in ("group", "dynamic")
    return Form(dtype, block, tuple(how.get("ignore") or ()), "compressed" if packed else "", zeros, by_group=by_group)


def _of_codes(how: Mapping[str, Any]) -> Form | None:
    """MXFP4 and NVFP4: numbers in e2m1, and a scale for each group of inputs."""
    packing, strategy = CODED[how["format"]]
    groups = [group.get("weights") or {} for group in how.get("config_groups", {}).values()]
    wanted = dict(num_bits=4, type="float", strategy=strategy, symmetric=True)
    sizes = {group.get("group_size") for group in groups}
    alike = all(group.get(name, value) == value for group in groups for name, value in wanted.items())
    size = next(iter(sizes)) if len(sizes) == 1 else None
    if not alike or not isinstance(size, int) or size < 2 or size % 2:
        return None
    return Form("e2m1", (1, size), tuple(how.get("ignore") or ()), packing)


def _mxfp4(how: Mapping[str, Any]) -> Form | None:
    """Experts of gpt-oss; nothing else is in this form. Names of modules that are not have `*` for any layer."""
    kept = [re.escape(name).replace(r"\*", "[^.]+") for name in how.get("modules_to_not_convert") or ()]
    ignored = (rf"re:(?!.*{re.escape(EXPERTS)})", *(rf"re:{name}(\.|$)" for name in kept))
    return Form("e2m1", (1, MX), ignored, "experts")


def _bitsandbytes(how: Mapping[str, Any]) -> Form | None:
    kind = how.get("bnb_4bit_quant_type", "fp4")
    if (
        not how.get("load_in_4bit")
        or kind not in ("nf4", "fp4")
        or how.get("bnb_4bit_quant_storage", "uint8") != "uint8"
    ):
        return None
    return Form(kind, (1, BLOCK), (*(how.get("llm_int8_skip_modules") or ()), "lm_head"), "bitsandbytes")


def _torchao(how: Mapping[str, Any]) -> Form | None:
    kinds = how.get("quant_type")
    one = kinds["default"] if isinstance(kinds, Mapping) and kinds.keys() == {"default"} else {}
    told = one.get("_data") or {}
    shared = told.get("granularity")
    shared = (shared[-1] if isinstance(shared, list) else shared) or {}  # the last one is for weights
    size = (shared.get("_data") or {}).get("group_size")
    blocks: dict[Any, tuple[int | None, int | None]] = dict(PerRow=(1, None), PerTensor=(None, None))
    if isinstance(size, int) and size > 1 and size % 2 == 0:
        blocks |= dict(PerGroup=(1, size))
    dtype, block = OF_TORCHAO.get(str(one.get("_type"))), blocks.get(shared.get("_type"))
    other = (told.get("weight_dtype") or {}).get("_data", "float8_e4m3fn") != "float8_e4m3fn"
    if not dtype or not block or other or how.get("include_input_output_embeddings") or one.get("_version") != 2:
        return None
    return Form(dtype, block, (*(how.get("modules_to_not_convert") or ()), "lm_head"), "torchao")


def _gptq(how: Mapping[str, Any]) -> Form | None:
    block, packing = _in_groups(how.get("group_size")), str(how.get("checkpoint_format", "gptq"))
    dtype = TYPES.get(("int", how.get("bits")))
    if dtype is None or block is None or packing not in ("gptq", "gptq_v2"):
        return None
    zeros, by_group = not how.get("sym", True), bool(how.get("desc_act", False)) and block[1] is not None
    return Form(dtype, block, ("lm_head",), packing, zeros, by_group=by_group)


def _awq(how: Mapping[str, Any]) -> Form | None:
    bits, size = (how.get(name, how.get(older)) for name, older in (("bits", "w_bit"), ("group_size", "q_group_size")))
    block = _in_groups(size)
    if bits != 4 or block is None or str(how.get("version", "gemm")).lower() != "gemm":
        return None
    return Form("s4", block, (*(how.get("modules_to_not_convert") or ()), "lm_head"), "awq", zeros=True)


def _in_groups(size: Any) -> tuple[int, int | None] | None:
    """Return the block that shares a scale, of so many inputs of an output, or if it is -1, of all; None for others."""
    if not isinstance(size, int) or (size < 2 and size != -1):
        return None
    return 1, (None if size == -1 else size)


def _fp8(how: Mapping[str, Any]) -> Form | None:
    if how.get("fmt", "e4m3") != "e4m3":
        return None
    outputs, inputs = how.get("weight_block_size") or (None, None)
    return Form(TYPES["float", 8], (outputs, inputs), (*(how.get("modules_to_not_convert") or ()), "lm_head"))
