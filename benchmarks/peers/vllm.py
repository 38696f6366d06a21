"""vLLM's build for CPUs: paged attention, chunked prompts, and a prefix cache. Its engine runs in processes of its own.

Llama's weights in 8 bits are written as compressed-tensors, symmetric, with a scale for each output. Activations are
quantized, too, for each token.
"""

import asyncio
import itertools
import json
import os
import queue
import shutil
import threading
from contextlib import closing
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from peers.common import run, serve

EIGHT_BITS = dict(
    quant_method="compressed-tensors", format="int-quantized", quantization_status="compressed", ignore=["lm_head"],
    config_groups=dict(
        group_0=dict(
            targets=["Linear"],
            weights=dict(num_bits=8, type="int", strategy="channel", symmetric=True, dynamic=False),
            input_activations=dict(num_bits=8, type="int", strategy="token", symmetric=True, dynamic=True),
        )
    ),
)  # fmt: skip


def prepare(task):
    shutil.copytree(task.checkpoint, task.directory, dirs_exist_ok=True)
    if task.format == "int8":
        quantize(Path(task.directory))


def quantize(directory):
    """Replace the weights of a checkpoint by integers and scales."""
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | dict(quantization_config=EIGHT_BITS)))
    tensors = {}
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  it is not a dictionary
            tensors[name] = tensor = file.get_tensor(name)
            if name.endswith("_proj.weight"):
                scale = tensor.float().abs().amax(1, keepdim=True) / 127
                tensors[name] = (tensor.float() / scale).round().to(torch.int8)
                tensors[f"{name}_scale"] = scale.to(tensor.dtype)
    save_file(tensors, directory / "model.safetensors", metadata=dict(format="pt"))


class Server:
    """An asynchronous engine in an event loop of its own."""

    def __init__(self, task):
        from vllm.engine.arg_utils import AsyncEngineArgs

        wanted = AsyncEngineArgs(
            model=task.directory, skip_tokenizer_init=True, dtype="bfloat16", max_num_seqs=task.clients,
            max_model_len=task.prompt + task.count + 8, max_num_batched_tokens=256, enable_prefix_caching=True,
            disable_log_stats=True,
        )  # fmt: skip
        self.loop, self.numbers = asyncio.new_event_loop(), itertools.count()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.engine = asyncio.run_coroutine_threadsafe(self.start(wanted), self.loop).result()

    async def start(self, wanted):
        from vllm.v1.engine.async_llm import AsyncLLM

        return AsyncLLM.from_engine_args(wanted)

    def answer(self, ids, count):
        tokens = queue.SimpleQueue()
        asyncio.run_coroutine_threadsafe(self.generate(ids, count, tokens), self.loop)
        return iter(tokens.get, None)

    async def generate(self, ids, count, tokens):
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=count, temperature=0, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        try:
            async for step in self.engine.generate(dict(prompt_token_ids=ids), params, str(next(self.numbers))):
                for token in step.outputs[0].token_ids:
                    tokens.put(token)
        finally:
            tokens.put(None)

    def close(self):
        self.engine.shutdown()


def measure(task):
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB, of which 17 requests of 1,152 positions of Llama-3.2-1B take 0.6
    with closing(Server(task)) as server:
        return serve(task, server)


if __name__ == "__main__":  # its processes import this file
    run(prepare, None, serve=measure)
