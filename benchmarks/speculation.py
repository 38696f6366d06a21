"""The gain of speculation: the bundled model at a realistic size, alone and with drafts, on held-out verses.

    python benchmarks/speculation.py [--tokens 64] [--prompts 8] [--rounds 3] [--amp f32] [--where calls,engine]
        [--requests 1,8]

Draft tokens come from a smaller model, from the text, or, in an engine, from the bundled EAGLE head. In an engine, so
many requests run at once.

Speculation pays if reading the weights is most of a token's cost. The bundled model is too small for that. So the
target is the same function in a GPT-2 of 12 layers and width 768: it has copies of the model's units, and the rest is
zeros, which cost as much as other numbers. The text and the acceptance rate of drafts are thus those of trained models.

The variants take turns, so that a busy machine slows all of them. Medians are printed. Nothing else should run at the
same time.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from transformers_neuronx import EagleDraft, Engine, SamplingParams
from transformers_neuronx.gpt2.model import GPT2ForSampling
from transformers_neuronx.speculation import PromptLookup
from transformers_neuronx.speculation.drafts import SpeculativeGenerator
from transformers_neuronx.speculation.fused import FusedSpeculativeDecoder

EXAMPLES = Path(__file__).parents[1] / "examples"
HEAD, PROMPT = 64, 32  # width of a head of GPT-2; tokens of a prompt


def enlarged(model, n_layer=12, n_embd=768):
    """Return a GPT-2 of that size with the logits of `model`, up to rounding."""
    small, copies = model.config, n_embd // model.config.n_embd
    sizes = dict(n_layer=n_layer, n_embd=n_embd, n_head=n_embd // HEAD)
    large = GPT2LMHeadModel(GPT2Config(**small.to_dict() | sizes)).eval()
    for weight in large.parameters():
        weight.data.zero_()  # a layer of zeros changes nothing
    weights = large.state_dict()
    for name, weight in model.state_dict().items():
        here = weights[name]
        if "c_attn" in name:  # by heads, which get wider: scores are divided by the root of their width
            weight = weight.unflatten(-1, (3, small.n_head, -1)).clone()
            weight[..., 0, :, :] *= (HEAD / weight.shape[-1]) ** 0.5
            here = here.unflatten(-1, (3, -1, HEAD))
        elif "attn.c_proj.weight" in name:
            weight, here = weight.unflatten(0, (small.n_head, -1)), here.unflatten(0, (-1, HEAD))
        if any(part in name for part in ("wte", "wpe", "ln_", "c_proj", "lm_head")):
            weight = torch.cat([weight] * copies, -1)  # a layer norm has the same mean and variance over copies
        here[tuple(map(slice, weight.shape))] = weight / copies if "ln_f" in name else weight
    return large


def widened(head, model, directory, width=768):
    """Save a head of the small model as one of the enlarged model, whose hidden states begin with the small one's."""
    weights, config = load_file(head / "model.safetensors"), json.loads((head / "config.json").read_text())
    depths = weights["fc.weight"].chunk(3, 1)
    wide = [torch.nn.functional.pad(depth, (0, width - depth.shape[1])) for depth in depths]
    weights |= {"fc.weight": torch.cat(wide, 1), "embed_tokens.weight": model.transformer.wte.weight.detach().half()}
    directory.mkdir()
    save_file(weights, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config | dict(target_hidden_size=width)))
    return EagleDraft.from_pretrained(directory)


class Counted:
    """A speculator that counts the target's steps."""

    def __init__(self, speculator):
        self.speculator, self.models, self.steps = speculator, speculator.models, 0

    def blocks(self, generation, *where):
        for block in self.speculator.blocks(generation, *where):
            self.steps += 1
            yield block


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=64, help="tokens after each prompt")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--amp", default="f32")
    parser.add_argument("--where", default="calls,engine", help="calls of the model, or an engine, or both")
    parser.add_argument("--requests", default="1,8", help="requests at once in an engine")
    arguments = parser.parse_args()
    length = PROMPT + arguments.tokens

    def compiled(path):
        model = GPT2ForSampling.from_pretrained(
            path, n_positions=length, context_length_estimate=PROMPT, amp=arguments.amp
        )
        model.to_neuron()
        return model

    with tempfile.TemporaryDirectory() as directory:
        small = AutoModelForCausalLM.from_pretrained(EXAMPLES / "tiny-kjv")
        enlarged(small).save_pretrained(directory)
        target = compiled(directory)
        eagle = widened(EXAMPLES / "tiny-kjv-eagle", small, Path(directory) / "eagle")
        measure(target, compiled(EXAMPLES / "tiny-kjv-draft"), eagle, arguments)


def measure(target, draft, eagle, arguments):
    chapters = (EXAMPLES / "tiny-kjv" / "heldout.txt").read_text(encoding="utf-8").split("<|endoftext|>")[1:]
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLES / "tiny-kjv")
    prompts = [tokenizer(text, return_tensors="pt").input_ids[:, :PROMPT] for text in chapters[: arguments.prompts]]
    if "calls" in arguments.where:
        in_calls(target, draft, prompts, arguments)
    sources = dict(draft=draft, eagle=eagle)
    kinds = [("alone", None, 1), ("text", PromptLookup(), 4)]
    kinds += [(f"{name}, k={k}", source, k) for name, source in sources.items() for k in (2, 4)]
    for requests in map(int, arguments.requests.split(",") if "engine" in arguments.where else []):
        in_engines(target, kinds, prompts, arguments, requests)


def in_calls(target, draft, prompts, arguments):
    """Compare calls of the model, one sequence at a time."""
    ways = {"alone": None}
    ways |= {f"draft, k={k}": SpeculativeGenerator(draft, target, k) for k in (2, 4, 8)}
    ways |= {f"draft in one program, k={k}": FusedSpeculativeDecoder(draft, target, k) for k in (4, 8)}
    ways |= {"prompt lookup, k=4": SpeculativeGenerator(None, target, 4)}
    for rules in (dict(top_k=1), dict(top_k=50, seed=0)):
        compare(
            target, ways, prompts, arguments, sequence_length=PROMPT + arguments.tokens, eos_token_override=-1, **rules
        )


def in_engines(target, kinds, prompts, arguments, requests):
    """Compare engines that answer so many requests at once, each batch of prompts one after another."""
    how = dict(rows=requests, step_tokens=64, cache_tokens=2 * requests * (PROMPT + arguments.tokens))
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(Engine(target, **how, draft=source, draft_tokens=k)) for name, source, k in kinds
        }
        for rules in (dict(temperature=0), dict(top_k=50, seed=0)):
            params = SamplingParams(max_tokens=arguments.tokens, ignore_eos=True, **rules)
            print(f"{arguments.amp}, an engine, {requests} requests at once, {arguments.tokens} tokens each, {rules}")
            times, right = in_turns(engines, prompts, params, arguments.rounds, requests)
            for name, own in times.items():
                low, middle, high = statistics.quantiles(
                    [base / taken for base, taken in zip(times["alone"], own, strict=True)]
                )
                share = right[name] / (len(prompts) * arguments.tokens)
                taken = statistics.median(own) / (requests * arguments.tokens) * 1e3
                print(
                    f"{name:32}{taken:9.3f} ms a token, {middle:5.2f} times as fast "
                    f"({low:.2f} to {high:.2f})  {share:.2f} were drafts"
                )


def in_turns(engines, prompts, params, rounds, requests):
    """Return the seconds of each engine for each batch of prompts in each round, and how many tokens were drafts in the
    last one. The first round warms up.
    """
    times, right, want = defaultdict(list), {}, {}
    for number in tqdm(range(rounds + 1), leave=False):
        right = dict.fromkeys(engines, 0)
        for first in range(0, len(prompts), requests):
            batch = prompts[first : first + requests]
            for name in [*engines][:: 1 if (number + first // requests) % 2 else -1]:
                start = time.perf_counter()
                got, count = answers(engines[name], batch, params)
                if number:
                    times[name].append(time.perf_counter() - start)
                right[name] += count
                assert want.setdefault(first, got) == got, f"{name}: tokens differ from the model's own"
    return times, right


def answers(engine, prompts, params):
    """Return the tokens after each prompt, and how many of them were draft tokens."""
    handles = [engine.submit(ids[0].tolist(), params) for ids in prompts]
    return [handle.result() for handle in handles], sum(handle.usage.accepted_tokens for handle in handles)


def compare(target, ways, prompts, arguments, **options):
    want = [target.sample(ids, **options) for ids in prompts]
    times, steps = defaultdict(list), {}
    for number in tqdm(range(arguments.rounds + 1), leave=False):
        for name, way in ways.items():
            counted = way and Counted(way)
            start = time.perf_counter()
            got = [target.sample(ids, speculator=counted, **options) for ids in prompts]
            if number:  # the first round warms up
                times[name].append((time.perf_counter() - start) / (len(prompts) * arguments.tokens) * 1e3)
            assert all(map(torch.equal, got, want)), f"{name}: tokens differ from the model's own"
            steps[name] = counted.steps if isinstance(way, SpeculativeGenerator) else None
    base = statistics.median(times["alone"])
    print(f"{arguments.amp}, one sequence, {len(prompts)} prompts, {arguments.tokens} tokens each, {options}")
    for name, values in times.items():
        made = f"{len(prompts) * arguments.tokens / steps[name]:.2f} tokens a step" if steps[name] else ""
        middle = statistics.median(values)
        print(f"{name:32}{middle:9.3f} ms a token, {base / middle:5.2f} times as fast  {made}")


if __name__ == "__main__":
    main()
