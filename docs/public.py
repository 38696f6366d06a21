"""The public API: which names of which modules. The API reference is made from this list.

tests/test_reference.py checks that each name has a docstring and types.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from types import ModuleType

PACKAGE = "transformers_neuronx"
ROOT = Path(__file__).parents[1]
FAMILIES = sorted(path.parent.name for path in (ROOT / PACKAGE).glob("*/model.py"))

# The public names of each module. None: all that it defines or re-exports.
PUBLIC: dict[str, list[str] | None] = {
    "huggingface.auto": [
        *("NeuronAutoModelForCausalLM", "NeuronAutoModelForSeq2SeqLM", "NeuronAutoModelForImageTextToText", "families"),
    ],
    "models.base": ["Model"],
    "models.sampling": None,
    "original.sampling_functions": None,
    "models.encoder_decoder": ["EncoderDecoderForSampling"],
    "models.vision": ["VisionForSampling"],
    **{f"{family}.model": None for family in FAMILIES},
    "engine.rules": ["Rules"],
    "serving.engine": ["Engine"],
    "serving.handles": ["Handle", "Usage"],
    "serving.request": ["SamplingParams"],
    "huggingface.adapter": ["HuggingFaceGenerationModelAdapter"],
    "speculation": [
        *("SpeculativeGenerator", "PromptLookup", "TokenAcceptor", "DefaultTokenAcceptor", "DraftProvider"),
        "DraftModelForSpeculation",
    ],
    "config.sparse_attention": ["SparseAttnConfig", "BlkSparseAttnConfig", "SlidingWindowAttnConfig"],
    "speculation.fused": ["FusedSpeculativeDecoder"],
    "config": [
        *("NeuronConfig", "QuantizationConfig", "KVCacheQuantizationConfig"),
        *("ContinuousBatchingConfig", "GenerationConfig"),
    ],
    "config.constants": None,
    "original.dtypes": ["to_amp", "to_pyhlo_type"],
    "original.utils": None,
    "weights.checkpoint": ["save_pretrained_split", "open_checkpoint", "open_weights", "Checkpoint"],
    "weights.quantizing": ["quantize", "Scheme", "scheme_named", "Written"],
    "engine.metrics": ["Metrics", "Call", "Totals"],
    "engine.profiling": ["Profile"],
    "analysis.inspection": None,
    "analysis.planning": None,
    "analysis.comparison": None,
    "analysis.perplexity": None,
    "trace": None,
    "pyhlo": ["HloScribe", "Scribe", "DType", "Shape", "Tensor", "TupleShape", "active_scribe", "dtype_named"],
    "hlo": None,
    "compiler": ["compile_py_func", "check"],
    "neuron.rules": ["check", "Finding"],
    "runtimes": ["get_runtime"],
    "runtimes.base": None,
    "errors": None,
}


def public_names(module: ModuleType, listed: list[str] | None) -> list[str]:
    """The names `listed`; if that is None, all functions and classes that the module defines or re-exports."""
    if listed is not None:
        return listed
    names = []
    for node in ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.ImportFrom):
            names += [alias.name for alias in node.names if alias.asname == alias.name]
    return [name for name in names if not name.startswith("_") and callable(getattr(module, name))]


def modules() -> dict[str, ModuleType]:
    """The public modules by name, each with its public names as `__all__`."""
    found = {}
    for name, listed in PUBLIC.items():
        module = found[f"{PACKAGE}.{name}"] = importlib.import_module(f"{PACKAGE}.{name}")
        module.__dict__["__all__"] = public_names(module, listed)
    return found
