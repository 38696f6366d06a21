"""Load the bundled checkpoint, compile it, and complete a prompt.

    python examples/demo.py --prompt "And God said unto Moses,"

`--model` takes any GPT-2 checkpoint, and `--tp-degree` any number of devices. On the CPU devices are virtual.
"""

import argparse
import time
from pathlib import Path

from transformers import AutoTokenizer, TextStreamer

from transformers_neuronx.config import NeuronConfig
from transformers_neuronx.gpt2.model import GPT2ForSampling


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=Path(__file__).parent / "tiny-kjv", help="checkpoint directory or hub name")
    parser.add_argument("--prompt", default="And it came to pass in those days, that")
    parser.add_argument("--tokens", type=int, default=160, help="number of tokens to generate")
    parser.add_argument("--top-k", type=int, default=40, help="1 is greedy")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=1611)
    parser.add_argument("--amp", default="f32", choices=["f32", "bf16", "f16"])
    parser.add_argument("--tp-degree", type=int, default=1)
    parser.add_argument("--runtime", choices=["cpu", "cuda", "neuron"], default=None)
    arguments = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    ids = tokenizer(arguments.prompt, return_tensors="pt").input_ids
    length = ids.shape[1] + arguments.tokens

    model = GPT2ForSampling.from_pretrained(
        arguments.model,
        n_positions=length,
        amp=arguments.amp,
        tp_degree=arguments.tp_degree,
        neuron_config=NeuronConfig(runtime=arguments.runtime),
    )
    print(f"loading and compiling {arguments.model}")
    begin = time.perf_counter()
    model.to_neuron()
    print(f"ready in {time.perf_counter() - begin:.1f} s on {model.decoder.runtime.description}\n")

    clock = Clock(TextStreamer(tokenizer))
    clock.put(ids)
    model.sample(
        ids,
        length,
        top_k=arguments.top_k,
        temperature=arguments.temperature,
        seed=arguments.seed,
        streamer=clock,
    )
    print(f"\n{clock.tokens} tokens, {clock.rate:.0f} a second, the first after {1000 * clock.first:.0f} ms")


class Clock:
    """A streamer that records the time of each token and passes the token on."""

    def __init__(self, streamer: TextStreamer) -> None:
        self.streamer = streamer
        self.times: list[float] = []

    def put(self, value) -> None:
        self.times.append(time.perf_counter())
        self.streamer.put(value)

    def end(self) -> None:
        self.streamer.end()

    @property
    def tokens(self) -> int:
        return len(self.times) - 1

    @property
    def first(self) -> float:
        """Seconds from the prompt to the first token."""
        return self.times[1] - self.times[0]

    @property
    def rate(self) -> float:
        """Tokens per second after the first token."""
        return (self.tokens - 1) / (self.times[-1] - self.times[1]) if self.tokens > 1 else float("nan")


if __name__ == "__main__":
    main()
