"""The gain of speculation: the bundled model at a realistic size, alone and with drafts, on held-out verses.

    python benchmarks/speculation.py [--tokens 64] [--prompts 6] [--rounds 3] [--amp f32]

Speculation pays if reading the weights is most of a token's cost. The bundled model is too small for that. So the
target is the same function in a GPT-2 of 12 layers and width 768: it has copies of the model's units, and the rest is
zeros, which cost as much as other numbers. The text and the acceptance rate of drafts are thus those of trained models.

The variants take turns, so that a busy machine slows all of them. Medians are printed. Nothing else should run at the
same time.
"""

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from transformers_neuronx.gpt2.model import GPT2ForSampling
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
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--amp", default="f32")
    arguments = parser.parse_args()
    length = PROMPT + arguments.tokens

    def compiled(path):
        model = GPT2ForSampling.from_pretrained(
            path, n_positions=length, context_length_estimate=PROMPT, amp=arguments.amp
        )
        model.to_neuron()
        return model

    with tempfile.TemporaryDirectory() as directory:
        enlarged(AutoModelForCausalLM.from_pretrained(EXAMPLES / "tiny-kjv")).save_pretrained(directory)
        target = compiled(directory)
    draft = compiled(EXAMPLES / "tiny-kjv-draft")
    chapters = (EXAMPLES / "tiny-kjv" / "heldout.txt").read_text(encoding="utf-8").split("<|endoftext|>")[1:]
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLES / "tiny-kjv")
    prompts = [tokenizer(text, return_tensors="pt").input_ids[:, :PROMPT] for text in chapters[: arguments.prompts]]
    ways = {"alone": None}
    ways |= {f"draft, k={k}": SpeculativeGenerator(draft, target, k) for k in (2, 4, 8)}
    ways |= {f"draft in one program, k={k}": FusedSpeculativeDecoder(draft, target, k) for k in (4, 8)}
    ways |= {"prompt lookup, k=4": SpeculativeGenerator(None, target, 4)}
    for rules in (dict(top_k=1), dict(top_k=50, seed=0)):
        compare(target, ways, prompts, arguments, sequence_length=length, eos_token_override=-1, **rules)


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
