"""What structured outputs cost, with a vocabulary of 131,072 tokens: a mask alone, and a token in an engine.

    python benchmarks/masks.py [--types bf16,s8] [--rows 1,8] [--rounds 5]

The tokenizer is Mistral's, from the package mistral-common, which pip downloads. The model has the shape of
Llama-3.2-1B, with random weights. Requests with a schema and without one take turns in the same process.
"""

from __future__ import annotations

import argparse
import base64
import json
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from cpu import CACHE
from engine import SHAPES, models, prompt, request, times_of
from transformers import LlamaConfig, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

from transformers_neuronx import Engine, StructuredOutputs
from transformers_neuronx.serving.structured import Parser

PACKAGE, TEKKEN = "mistral-common==1.13.1", "mistral_common/data/tekken_240911.json"
VOCABULARY, PROMPT, TOKENS = 131072, 64, 96
TEXT = dict(type="string", minLength=8, maxLength=60)
PERSON = dict(name=TEXT, age=dict(type="integer"), tags=dict(type="array", items=TEXT), kind=dict(enum=["a", "b", "c"]))
SCHEMAS = {
    "records": dict(
        type="array", minItems=40,
        items=dict(type="object", properties=PERSON, required=[*PERSON], additionalProperties=False),
    ),
    "any object": dict(type="object", minProperties=40),
}  # fmt: skip


class Tekken(TikTokenConverter):
    """A tokenizer of Transformers from Mistral's file, with the first `size` ids."""

    def __init__(self, path, size):
        super().__init__(path)
        self.size = size

    def load_tiktoken_bpe(self, path):
        told = json.loads(Path(path).read_text())
        ids = range(told["config"]["default_num_special_tokens"], self.size)
        return {base64.b64decode(each["token_bytes"]): place for each, place in zip(told["vocab"], ids, strict=False)}


def tokenizer(size):
    """Return the tokenizer with its first `size` ids; the first time, download it."""
    where = CACHE / "tekken.json"
    if not where.exists():
        with tempfile.TemporaryDirectory() as scratch:
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", scratch, PACKAGE]
            subprocess.run(command, check=True)
            [wheel] = Path(scratch).glob("*.whl")
            where.parent.mkdir(parents=True, exist_ok=True)
            where.write_bytes(zipfile.ZipFile(wheel).read(TEKKEN))
    return PreTrainedTokenizerFast(tokenizer_object=Tekken(where, size).converted())


def gaps(engine, rows, seed, outputs):
    """Return the seconds between the tokens of `rows` requests at once."""
    how = request(TOKENS, structured_outputs=outputs)
    handles = [engine.submit(prompt(PROMPT, seed + row, engine.vocab_size), how) for row in range(rows)]
    with ThreadPoolExecutor(rows) as readers:
        return np.concatenate([np.diff(came) for came in readers.map(times_of, handles)])


def noted(times):
    """Let every mask note how many seconds it took."""
    fill = Parser.fill

    def timed(*how):
        began = time.perf_counter()
        fill(*how)
        times.append(time.perf_counter() - began)

    Parser.fill = timed


def measured(engine, rows, rounds, masks):
    """Return milliseconds between tokens without a schema; for each schema the ratio, and microseconds of a mask."""
    kinds = {"none": None} | {name: StructuredOutputs(json=schema) for name, schema in SCHEMAS.items()}
    found, taken = {name: [] for name in kinds}, {name: [] for name in kinds}
    for number in range(rounds + 1):
        for name, outputs in kinds.items():
            masks.clear()
            mean = gaps(engine, rows, 1000 * number, outputs).mean()
            if number:  # the first round warms up
                found[name].append(mean)
                taken[name] += masks
    told = dict(rows=rows, between_ms=round(statistics.median(found["none"]) * 1e3, 2))
    for name in SCHEMAS:
        ratios = [each / plain for each, plain in zip(found[name], found["none"], strict=True)]
        p50, p99 = np.percentile(taken[name], (50, 99)) * 1e6
        told[name] = dict(ratio=round(statistics.median(ratios), 4), mask_us=round(p50), mask_p99_us=round(p99))
    return told


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default="bf16,s8")
    parser.add_argument("--rows", default="1,8")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    words, counts = tokenizer(VOCABULARY), [int(rows) for rows in options.rows.split(",")]
    noted(masks := [])
    config = LlamaConfig(**SHAPES["llama-1b"].to_dict() | dict(vocab_size=VOCABULARY))
    for name, model in models(config, options.types.split(","), n_positions=512):
        with Engine(model, rows=max(counts), tokenizer=words) as engine:
            for rows in counts:
                about = dict(type=name, vocabulary=VOCABULARY) | measured(engine, rows, options.rounds, masks)
                print(json.dumps(about), flush=True)


if __name__ == "__main__":
    main()
