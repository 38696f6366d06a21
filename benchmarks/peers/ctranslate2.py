"""CTranslate2, with files of its own converter."""

from pathlib import Path

import ctranslate2

from peers.common import Clock, run

TYPES = {"f32": "float32", "bf16": "bfloat16", "int8": "int8"}


def prepare(task):
    from ctranslate2.converters import TransformersConverter

    TransformersConverter(task.checkpoint).convert(task.directory, quantization=TYPES[task.format], force=True)


def load(task):
    return Engine(task)


class Engine:
    def __init__(self, task):
        self.weights = Path(task.directory, "model.bin").stat().st_size
        options = dict(compute_type=TYPES[task.format], intra_threads=task.threads, inter_threads=1)
        self.generator = ctranslate2.Generator(task.directory, device="cpu", **options)

    def generate(self, ids, count):
        clock = Clock()
        results = self.generator.generate_batch(
            [list(map(str, row)) for row in ids],  # the tokenizer's words are its ids
            max_length=count, min_length=count, include_prompt_in_result=False, sampling_topk=1,
            callback=lambda _: clock.token() or False,
        )  # fmt: skip
        seconds = clock.seconds()
        return [result.sequences_ids[0] for result in results], *seconds


run(prepare, load)
