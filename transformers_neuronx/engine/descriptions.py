"""What a model and an artifact must have in common, in the types of JSON: what is saved, read back, and compared.

The family, its configuration and the options say which model it is; the code says who wrote its modules.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import operator
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers_neuronx.config import (
    Blocks,
    CompileOptions,
    ContinuousBatchingConfig,
    KVCacheQuantizationConfig,
    NeuronConfig,
    QuantizationConfig,
)
from transformers_neuronx.config.sparse_attention import Pattern
from transformers_neuronx.engine.compile_cache import WrittenModules, cache_of_user
from transformers_neuronx.engine.decoder import Decoder
from transformers_neuronx.engine.family import Family
from transformers_neuronx.engine.manifest import as_json, sha256_of

PACKAGE = Path(__file__).parents[1]  # the root of this package


def description(family: Family, config: Any, options: CompileOptions) -> dict[str, Any]:
    """Return what a model and an artifact must have in common, in the types of JSON."""
    told = dict(family=family.name, config=dataclasses.asdict(config), options=dataclasses.asdict(options))
    in_json: dict[str, Any] = json.loads(as_json(told))
    compiled = in_json["options"]
    del compiled["workers"]  # the number of parallel compilations changes no program
    # Artifacts of earlier versions do not have them.
    later: dict[str, Any] = dict(blocks=None, head=True, score=None, score_tokens=[], expert_parallel=False, patches=[])
    kept = {name: value for name, value in compiled.items() if name not in later or value != later[name]}
    return in_json | dict(options=kept)


def constructor_options(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's constructor options from those that are saved, as far as they determine what is in an artifact.

    Raises whatever the saved values lead to if they are not valid.
    """
    names = ("batch_size", "prompt_batch_size", "tp_degree", "unroll", "context_unroll")
    sizes, numbers = saved["buckets"], {name: saved[name] for name in names}
    names_of_sizes = ("positions", "context", "sources")
    positions, context, sources = (list(map(operator.index, sizes[name])) for name in names_of_sizes)
    if not all(value is None or type(value) is int for value in numbers.values()):
        raise ValueError(f"expected whole numbers, got {numbers}")
    switches = NeuronConfig(
        tokens_per_dispatch=saved["chunk"],
        quant=saved["quant"] and QuantizationConfig(**saved["quant"]),
        kv_cache_quant=saved["kv_cache_quant"] and KVCacheQuantizationConfig(**saved["kv_cache_quant"]),
        sparse_attn=saved["sparse"] and Pattern(**saved["sparse"]).config(),
        shard_over_sequence=saved["shard_over_sequence"],
        expert_parallel=saved.get("expert_parallel", False),
        continuous_batching=_batching(saved),
        output_all_logits=bool((saved.get("blocks") or {}).get("all_logits")),
    )
    sizes = dict(n_positions=positions, context_length_estimate=sources or context, amp=str(saved["amp"]))
    images = dict(image_patches=list(map(operator.index, saved["patches"]))) if saved.get("patches") else {}
    return dict(**sizes, **numbers, **images, neuron_config=switches)


def _batching(saved: Mapping[str, Any]) -> ContinuousBatchingConfig | None:
    """Return what divides the cache into the saved blocks, if there are any."""
    if not saved.get("blocks"):
        return None
    blocks, longest = Blocks(**saved["blocks"]), max(saved["buckets"]["positions"])
    batching = ContinuousBatchingConfig(
        saved["batch_size"],
        max_model_len=longest,
        optimized_paged_attention=True,
        enable_chunked_prefill=blocks.chunked,
    )
    batching.init_cache_engine(blocks.size, blocks.count)
    return batching


def differences(saved: Mapping[str, Any], wanted: Mapping[str, Any], inside: str = "") -> list[str]:
    """Return each difference, such as "amp: saved bf16, expected f32"."""
    found = []
    for name in sorted(saved.keys() | wanted.keys()):
        one, other = (values.get(name, "nothing") for values in (saved, wanted))
        where = inside + name
        if isinstance(one, dict) and isinstance(other, dict):
            found += differences(one, other, "" if where == "options" else f"{where}.")
        elif one != other:
            line = f"{where}: saved {str(one)[:80]}, expected {str(other)[:80]}"
            found.append(line.encode("ascii", "backslashreplace").decode())
    return found


def code_of(decoder: Decoder) -> str:
    """Return a digest of the code and settings that write the modules, or "" if some code is outside this package."""
    written_by = decoder.family.graph, decoder.family.weights
    homes = *(getattr(module, "__name__", "") for module in written_by), type(decoder.config).__module__
    if not (_own_code() and all(home.startswith(f"{PACKAGE.name}.") for home in homes)):
        return ""
    programs = decoder.programs
    return f"{_own_code()} panels={programs.panels} in_place={programs.in_place} scatters={programs.scatters}"


def modules_of(decoder: Decoder) -> WrittenModules | None:
    """Return the modules of the same model that this code has written before. None without a cache of the user, or if
    other code writes some of them.
    """
    code, cache = code_of(decoder), cache_of_user(".hlo")
    if not code or cache is None:
        return None
    model = dict(code=code, **description(decoder.family, decoder.config, decoder.options))
    return WrittenModules(cache, hashlib.sha256(as_json(model)).hexdigest())


@functools.cache
def _own_code() -> str:
    sources = {str(path.relative_to(PACKAGE)): sha256_of(path) for path in sorted(PACKAGE.rglob("*.py"))}
    return hashlib.sha256(json.dumps(sources).encode()).hexdigest() if sources else ""
