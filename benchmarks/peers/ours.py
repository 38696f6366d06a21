"""The project itself: it prepares an artifact with programs and weights, from which a single sequence starts.

Head and embedding are also quantized, where peers do so. With a8, activations are rounded to 8 bits, as OpenVINO and
llama.cpp do with weights of 8 and 4 bits. Without it, they stay in bf16.
"""

import math
from pathlib import Path

import torch
from safetensors import safe_open

import transformers_neuronx as tnx
from peers.common import Clock, run, serve
from transformers_neuronx.config import NeuronConfig, QuantizationConfig
from transformers_neuronx.huggingface.auto import NeuronAutoModelForCausalLM

TINY_KJV = Path(__file__).parents[2] / "examples" / "tiny-kjv"
WHOLE = dict(quantize_head=True, quantize_embedding=True)
FORMATS = {
    "f32": ("f32", None),
    "bf16": ("bf16", None),
    "f16": ("f16", None),
    "s8": ("bf16", dict(quant_dtype="s8", **WHOLE)),
    "s8 a8": ("bf16", dict(quant_dtype="s8", activation_dtype="s8", **WHOLE)),
    "s4 g32": ("bf16", dict(quant_dtype="s4", group_size=32, **WHOLE)),
    "s4 g32 a8": ("bf16", dict(quant_dtype="s4", group_size=32, activation_dtype="s8", **WHOLE)),
}


def prepare(task):
    made(task.checkpoint, task.format, 1, *task.buckets["1"]).save(task.directory, sharded_weights=True)
    for rows in set(task.buckets) - {"1"}:  # their programs go to the compile cache
        made(task.checkpoint, task.format, int(rows), *task.buckets[rows])


def made(checkpoint, name, rows, positions, contexts):
    amp, quant = FORMATS[name]
    model = NeuronAutoModelForCausalLM.from_pretrained(
        checkpoint, n_positions=positions, context_length_estimate=contexts, batch_size=rows, amp=amp,
        neuron_config=NeuronConfig(quant=QuantizationConfig(**quant) if quant else None),
    )  # fmt: skip
    model.to_neuron()
    return model


def load(task):
    if task.rows > 1:
        return Engine(task, made(task.checkpoint, task.format, task.rows, *task.buckets[str(task.rows)]))
    model = NeuronAutoModelForCausalLM.from_pretrained(task.directory)
    model.to_neuron()
    return Engine(task, model)


class Engine:
    def __init__(self, task, model):
        self.model, self.directory = model, Path(task.directory)

    @property
    def weights(self):
        """Bytes that were saved, without an embedding that is not also the head: a token reads only a row of it."""
        total = sum(path.stat().st_size for path in self.directory.glob("*.safetensors"))
        with safe_open(self.directory / "weights-shared.safetensors", framework="pt") as file:
            parts = {name.partition("@")[0]: file.get_tensor(name).nbytes for name in file.keys()}  # noqa: SIM118
        return total - ("head.weight" in parts) * (parts["embed"] + parts.get("embed_scale", 0))

    def generate(self, ids, count):
        clock, ids = Clock(), torch.tensor(ids)
        if count == 1:  # a prompt may fill all positions
            tokens = self.model(ids).argmax(-1, keepdim=True)
        else:
            watch = dict(stopping_criteria_list=lambda *_: clock.token() or False)
            end = ids.shape[1] + count
            tokens = self.model.sample(ids, end, top_k=1, eos_token_override=-1, **watch)[:, ids.shape[1] :]
        return tokens.tolist(), *clock.seconds()


class Server:
    """An engine with a cache for all requests at once. Prompts are in chunks of 256 tokens, as OpenVINO's are."""

    def __init__(self, task, tokenizer=None):
        amp, quant = FORMATS[task.format]
        longest = -(-(task.prompt + task.count) // 64) * 64
        model = NeuronAutoModelForCausalLM.from_pretrained(
            task.checkpoint, n_positions=longest, amp=amp,
            neuron_config=NeuronConfig(quant=QuantizationConfig(**quant) if quant else None),
        )  # fmt: skip
        model.to_neuron(ahead=False)
        sizes = dict(rows=task.clients, step_tokens=256, joined_tokens=256)
        self.engine = tnx.Engine(model, **sizes, cache_tokens=(1 + task.clients) * longest, tokenizer=tokenizer)

    def answer(self, ids, count):
        return self.engine.submit(ids, tnx.SamplingParams(max_tokens=count, temperature=0, ignore_eos=True))


def perplexity(task):
    """Return the bundled checkpoint's perplexity on held-out text, as in `tests/families/test_quantized.py`."""
    from transformers import AutoTokenizer  # takes seconds to import, which a start from an artifact avoids

    ids = AutoTokenizer.from_pretrained(TINY_KJV)((TINY_KJV / "heldout.txt").read_text(), verbose=False).input_ids
    length = 512
    model = made(TINY_KJV, task.format, 1, [length], [length])
    pieces = [ids[first : first + length] for first in range(0, len(ids) - 1, length - 1)]
    scores = torch.cat([model.score([piece])[0, 1:] for piece in pieces])
    return dict(perplexity=math.exp(-scores.mean()), tokens=len(scores))


if __name__ == "__main__":  # ours_server imports this file
    run(prepare, load, perplexity=perplexity, serve=lambda task: serve(task, Server(task)))
