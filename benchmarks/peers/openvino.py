"""OpenVINO GenAI, with files that optimum-intel exports: paged attention, and by its own default a key cache in u8.

Weights in 8 and 4 bits are symmetric. Activations are quantized where OpenVINO does that by default.
"""

import itertools
import queue
import threading
from pathlib import Path

import numpy as np
import openvino
import openvino_genai

from peers.common import Clock, convert, run, serve

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


class Server:
    """The pipeline with chunked prompts, a prefix cache and a cache for all requests, stepped by one thread."""

    def __init__(self, task):
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_batched_tokens, scheduler.max_num_seqs = 256, max(task.clients, 1)
        scheduler.dynamic_split_fuse = scheduler.enable_prefix_caching = True
        scheduler.num_kv_blocks = (1 + task.clients) * -(-(task.prompt + task.count) // 32)
        options = dict(INFERENCE_PRECISION_HINT="bf16", INFERENCE_NUM_THREADS=task.threads)
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(task.directory, scheduler, "CPU", options)
        self.running, self.turn, self.numbers = {}, threading.Condition(), itertools.count()
        threading.Thread(target=self.steps, daemon=True).start()

    def steps(self):
        while True:
            with self.turn:
                self.turn.wait_for(lambda: self.running)
            self.pipeline.step()
            with self.turn:
                running = list(self.running.items())
            for number, (handle, tokens) in running:
                while handle.can_read():
                    for token in handle.read()[0].generated_ids:
                        tokens.put(token)
                if handle.get_status() == openvino_genai.GenerationStatus.FINISHED:
                    tokens.put(None)
                    with self.turn:
                        del self.running[number]

    def answer(self, ids, count):
        wanted = openvino_genai.GenerationConfig(max_new_tokens=count, ignore_eos=True, do_sample=False)
        tokens = queue.SimpleQueue()
        with self.turn:
            number = next(self.numbers)
            handle = self.pipeline.add_request(number, openvino.Tensor(np.array([ids])), wanted)
            self.running[number] = handle, tokens
            self.turn.notify()
        return iter(tokens.get, None)


run(prepare, load, serve=lambda task: serve(task, Server(task)))
