"""The API reference, made of docstrings: `python docs/reference.py DIRECTORY` writes pages that need no network.

What is public is listed here and nowhere else; tests/test_reference.py wants a docstring and types of all of it.
"""

from __future__ import annotations

import ast
import importlib
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pdoc.doc
import pdoc.render

PACKAGE = "transformers_neuronx"
ROOT = Path(__file__).parents[1]
FAMILIES = sorted(path.parent.name for path in (ROOT / PACKAGE).glob("*/model.py"))

# The public names of each module; None is all that it defines, or imports under its own name to hand on.
PUBLIC: dict[str, list[str] | None] = {
    "auto": ["NeuronAutoModelForCausalLM", "NeuronAutoModelForSeq2SeqLM", "families"],
    "models": ["Model"],
    "sampling": None,
    "encoder_decoder": ["EncoderDecoderForSampling"],
    **{f"{family}.model": None for family in FAMILIES},
    "generation": ["Rules"],
    "generation_utils": ["HuggingFaceGenerationModelAdapter"],
    "speculation": ["SpeculativeGenerator", "PromptLookup"],
    "fused_speculation": ["FusedSpeculativeDecoder"],
    "config": [
        *("NeuronConfig", "QuantizationConfig", "KVCacheQuantizationConfig"),
        *("ContinuousBatchingConfig", "GenerationConfig"),
    ],
    "constants": None,
    "dtypes": ["to_amp", "to_pyhlo_type"],
    "utils": None,
    "module": ["save_pretrained_split", "open_checkpoint", "open_weights", "Checkpoint"],
    "metrics": ["Metrics", "Call", "Totals"],
    "profiling": ["Profile"],
    "inspection": None,
    "planning": None,
    "comparison": None,
    "trace": None,
    "pyhlo": ["HloScribe", "DType", "Shape", "Tensor", "TupleShape", "active_scribe", "dtype_named"],
    "hlo": None,
    "compiler": ["compile_py_func", "check"],
    "neuron.rules": ["check", "Finding"],
    "runtimes": ["get_runtime"],
    "runtimes.base": None,
    "errors": None,
}


def public_names(module: ModuleType, listed: list[str] | None) -> list[str]:
    """The names `listed`, or if that is None all functions and classes that a type checker takes for exported."""
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
    """The modules of the reference by name, their `__all__` being what is public in them."""
    found = {}
    for name, listed in PUBLIC.items():
        module = found[f"{PACKAGE}.{name}"] = importlib.import_module(f"{PACKAGE}.{name}")
        module.__dict__["__all__"] = public_names(module, listed)
    return found


def write(directory: Path) -> None:
    """A page for each module, an index and what is searched."""
    warnings.simplefilter("ignore", UserWarning)  # types that only a type checker resolves are shown as written
    pdoc.render.configure(show_source=False, footer_text=PACKAGE)
    pages = {name: pdoc.doc.Module(module) for name, module in modules().items()}
    for name, page in pages.items():
        target = directory / f"{name.replace('.', '/')}.html"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(pdoc.render.html_module(page, pages), encoding="utf-8")
    (directory / "index.html").write_text(pdoc.render.html_index(pages), encoding="utf-8")
    (directory / "search.js").write_text(pdoc.render.search_index(pages), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
    print(f"{sys.argv[1]}/index.html")
