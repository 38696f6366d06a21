"""OpenVINO GenAI, with files that optimum-intel exports: paged attention, and by its own default a key cache in u8.

Weights in 8 and 4 bits are symmetric. Activations are quantized where OpenVINO does that by default.
"""

from pathlib import Path

import numpy as np
import openvino
import openvino_genai

from peers.common import Clock, convert, run

WEIGHTS = {
    "f32": ["fp32"],
    "bf16": ["fp16"],  # the only format in 16 bits; the plugin converts it to bf16
    "int8": ["int8", "--sym"],
    "int4 g32": ["int4", "--sym", "--group-size", "32", "--ratio", "1.0", "--backup-precision", "int8_sym"],
}


def prepare(task):
    what = ["--model", task.checkpoint, "--task", "text-generation-with-past", "--weight-format", *WEIGHTS[task.format]]
    convert("optimum.commands.optimum_cli", "export", "openvino", *what, task.directory)


def load(task):
    return Engine(task)


class Engine:
    def __init__(self, task):
        self.weights = Path(task.directory, "openvino_model.bin").stat().st_size
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = task.rows * task.positions[-1]  # whole prompts at once
        scheduler.max_num_seqs = task.rows
        scheduler.num_kv_blocks = 0
        precision = "f32" if task.format == "f32" else "bf16"
        options = dict(INFERENCE_PRECISION_HINT=precision, INFERENCE_NUM_THREADS=task.threads)
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(task.directory, scheduler, "CPU", options)

    def generate(self, ids, count):
        wanted = openvino_genai.GenerationConfig(max_new_tokens=count, ignore_eos=True, do_sample=False)
        clock, pipeline = Clock(), self.pipeline
        handles = [
            pipeline.add_request(row, openvino.Tensor(np.array([row_ids])), wanted) for row, row_ids in enumerate(ids)
        ]
        while pipeline.has_non_finished_requests():
            pipeline.step()
            clock.token()
        seconds = clock.seconds()
        return [handle.read_all()[0].generated_ids for handle in handles], *seconds


run(prepare, load)
