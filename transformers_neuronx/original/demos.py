"""The original's demos: `gpt2_demo`, `opt_demo`, `gptj_demo`, `gptneox_demo` and `generation_demo`.

`save` writes a split checkpoint, and `run` generates from one. `transformers-neuronx generate` does more.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from transformers_neuronx.config import NeuronConfig, QuantizationConfig
from transformers_neuronx.config.switches import KVCacheQuantizationConfig
from transformers_neuronx.huggingface.adapter import HuggingFaceGenerationModelAdapter
from transformers_neuronx.huggingface.auto import family_of
from transformers_neuronx.huggingface.tokenizers import tokenizer_in
from transformers_neuronx.models.sampling import ForSampling
from transformers_neuronx.pyhlo.dtypes import to_torch
from transformers_neuronx.weights.checkpoint import save_pretrained_split
from transformers_neuronx.weights.directories import resolve_tokenizer

PROMPT = "In the beginning"


def gpt2_main() -> None:
    """Run the command `gpt2_demo`."""
    demo("gpt2", "gpt2")


def opt_main() -> None:
    """Run the command `opt_demo`."""
    demo("opt", "facebook/opt-125m")


def gptj_main() -> None:
    """Run the command `gptj_demo`."""
    demo("gptj", "EleutherAI/gpt-j-6B")


def gptneox_main() -> None:
    """Run the command `gptneox_demo`."""
    demo("gpt_neox", "EleutherAI/gpt-neox-20b")


def demo(family: str, model_name: str) -> None:
    """Run the demo of a family, with the arguments of the command line."""
    parser = _parser()
    parser.add_argument("--model_name", default=model_name, help="model or tokenizer, local or on the hub")
    given = _parsed(parser)
    if given.which == "save":
        _save(given, given.model_name, family)
        return
    options = dict(quant=QuantizationConfig(dequant_dtype="f16") if given.quantize else None)
    model = _compiled(family, given, options)
    text = [PROMPT] * given.batch_size
    ids = _tokenizer(given.model_name)(text, return_tensors="pt").input_ids
    _show(given.model_name, model.sample(ids, sequence_length=given.n_positions))


def generation_main() -> None:
    """Run the command `generation_demo`."""
    parser = _parser(more=True)
    parser.add_argument("--hf_model", help="model or tokenizer, local or on the hub (default: the checkpoint itself)")
    given = _parsed(parser)
    if given.which == "save":
        _save(given, given.hf_model or given.model_type, given.model_type)
        return
    cache = KVCacheQuantizationConfig(quant_dtype="f8e4m3fn") if given.kv_cache_quant else None
    model = _compiled(
        given.model_type, given, dict(quant=QuantizationConfig() if given.quant else None, kv_cache_quant=cache)
    )
    name = given.hf_model or given.load
    if given.prompt_len:
        ids = torch.randint(0, model.config.vocab_size, (given.batch_size, given.prompt_len))
    else:
        ids = _tokenizer(name)([given.prompt] * given.batch_size, return_tensors="pt").input_ids
    end = given.max_length or ids.shape[1] + (given.max_new_tokens or given.n_positions - ids.shape[1])
    if given.simple_sample:
        rules = dict(top_k=given.top_k, top_p=given.top_p, temperature=given.temperature)
        out = model.sample(ids, end, eos_token_override=given.simple_sample_eos_token_override, **rules)
    else:
        adapter = HuggingFaceGenerationModelAdapter(model.config, model)
        out = adapter.generate(
            ids, attention_mask=torch.ones_like(ids), max_length=end, num_beams=given.beam, do_sample=given.do_sample,
            top_k=given.top_k, top_p=given.top_p, temperature=given.temperature,
            no_repeat_ngram_size=given.no_repeat_ngram_size, num_return_sequences=given.num_return_sequences,
            repetition_penalty=given.repetition_penalty,
        )  # fmt: skip
    print(out) if given.prompt_len else _show(name, out)
    if given.benchmark:
        print(model.metrics)


def _parser(more: bool = False) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[1] if __doc__ else None)
    parser.add_argument("--amp", default="f32", help="f32, bf16 or f16; f32-u8-bf16 has weights in eight bits")
    if more:
        parser.add_argument("model_type", help="type of the model, such as llama")
    commands = parser.add_subparsers(dest="which", required=True)
    save = commands.add_parser("save", help="write a split checkpoint")
    save.add_argument("save", help="directory to save to")
    save.add_argument("--random", action="store_true", help="random weights, in the sizes of --config")
    save.add_argument("--config", help="path of a config.json")
    run = commands.add_parser("run", help="generate from a checkpoint")
    run.add_argument("load", help="directory of a checkpoint")
    run.add_argument("--batch_size", type=int, default=1 if more else 4)
    run.add_argument("--n_positions", type=int, default=128)
    run.add_argument("--tp_degree", type=int, default=2)
    for name in ("unroll", "context_unroll", "context_length_estimate"):
        run.add_argument(f"--{name}", type=int)
    run.add_argument("--print_latency", action="store_true", help="print the time of each token")
    if not more:
        run.add_argument("--quantize", action="store_true", help="weights in eight bits")
        return parser
    for name in ("quant", "kv_cache_quant", "simple_sample", "do_sample", "benchmark"):
        run.add_argument(f"--{name}", action="store_true")
    for name in ("max_length", "max_new_tokens", "prompt_len", "simple_sample_eos_token_override"):
        run.add_argument(f"--{name}", type=int)
    numbers = dict(beam=1, top_k=1, top_p=1.0, temperature=1.0, no_repeat_ngram_size=0, num_return_sequences=1)
    for name, default in (numbers | dict(repetition_penalty=1.0)).items():
        run.add_argument(f"--{name}", type=type(default), default=default)
    run.add_argument("--prompt", default=PROMPT)
    return parser


def _parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    given, unknown = parser.parse_known_args()
    if unknown:
        print(f"these have no effect here: {' '.join(unknown)}", file=sys.stderr)
    return given


def _save(given: argparse.Namespace, name: str, family: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    if given.random:
        if not given.config:
            raise SystemExit("--random needs --config, the path of a config.json")
        with open(given.config) as file:
            config = AutoConfig.for_model(**dict(model_type=family) | json.load(file))
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    else:
        model = AutoModelForCausalLM.from_pretrained(name)
    save_pretrained_split(model.to(to_torch(given.amp.split("-")[0])), given.save)


def _compiled(family: str, given: argparse.Namespace, switches: dict[str, Any]) -> ForSampling:
    copies = max(vars(given).get("beam", 1), vars(given).get("num_return_sequences", 1))
    sizes = dict(batch_size=given.batch_size * copies, n_positions=given.n_positions, tp_degree=given.tp_degree)
    more: dict[str, Any] = dict(unroll=given.unroll, context_unroll=given.context_unroll, amp=given.amp)
    if given.context_length_estimate is not None:
        more["context_length_estimate"] = given.context_length_estimate
    more["neuron_config"] = NeuronConfig(**switches)
    model = family_of(family).from_pretrained(given.load, **sizes, **more)
    if given.print_latency:
        printer = LatencyPrinter()
        model.register_forward_pre_hook(printer.pre_hook)
        model.register_forward_hook(printer.hook)
    model.to_neuron()
    return model


def _tokenizer(name: str) -> Any:
    return tokenizer_in(resolve_tokenizer(os.fspath(name)))


def _show(name: str, ids: Sequence[Any]) -> None:
    for text in _tokenizer(name).batch_decode(ids, skip_special_tokens=True):
        print(text)


class LatencyPrinter:
    """Hooks that print the milliseconds of each call."""

    start = 0.0

    def pre_hook(self, *_: Any) -> None:
        """Note the time before a call."""
        self.start = time.perf_counter()

    def hook(self, *_: Any) -> None:
        """Print the time of a call."""
        print(f"{(time.perf_counter() - self.start) * 1e3:.1f} ms")
