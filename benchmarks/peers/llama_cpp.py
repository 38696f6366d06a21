"""llama.cpp through llama-cpp-python. GGUF is written here in bf16 or f32, and quantized by llama.cpp."""

from pathlib import Path

import llama_cpp
import numpy as np

from peers.common import Clock, run
from peers.gguf_files import write

QUANTIZED = {"q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, "q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0}


def prepare(task):
    path = Path(task.directory, "model.gguf")
    if task.format not in QUANTIZED:
        write(task.checkpoint, path, task.format)
        return
    whole = path.with_name("whole.gguf")
    write(task.checkpoint, whole, "bf16")
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype, options.nthread = QUANTIZED[task.format], task.threads
    failed = llama_cpp.llama_model_quantize(str(whole).encode(), str(path).encode(), options)
    whole.unlink()
    if failed:
        raise RuntimeError(f"llama_model_quantize returned {failed}")


def load(task):
    llama_cpp.llama_log_set(silent, None)
    llama_cpp.llama_backend_init()
    return Engine(task)


@llama_cpp.llama_log_callback
def silent(level, text, data):
    """Drop the log, which is long."""


class Engine:
    def __init__(self, task):
        path = Path(task.directory, "model.gguf")
        self.weights = path.stat().st_size
        options = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), options)
        options = llama_cpp.llama_context_default_params()
        options.n_ctx, options.n_seq_max = task.rows * task.positions[-1], task.rows
        options.n_batch = task.rows * task.positions[-1]
        options.n_threads = options.n_threads_batch = task.threads
        self.context = llama_cpp.llama_init_from_model(self.model, options)
        self.batch = llama_cpp.llama_batch_init(options.n_batch, 0, 1)
        self.vocab = task.vocab

    def generate(self, ids, count):
        clock = Clock()
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), False)
        tokens = [[] for _ in ids]
        while len(tokens[0]) < count:
            start = len(ids[0]) + len(tokens[0]) - 1 if tokens[0] else 0
            for row, chosen in enumerate(self.step([row[-1:] for row in tokens] if start else ids, start)):
                tokens[row].append(chosen)
            clock.token()
        return tokens, *clock.seconds()

    def step(self, ids, start):
        """Return the most likely token after each row of ids, the first of which is at the position `start`."""
        batch, place, last = self.batch, 0, []
        for row, row_ids in enumerate(ids):
            for offset, token in enumerate(row_ids):
                batch.token[place], batch.pos[place] = token, start + offset
                batch.n_seq_id[place], batch.seq_id[place][0] = 1, row
                batch.logits[place] = offset == len(row_ids) - 1
                place += 1
            last.append(place - 1)
        batch.n_tokens = place
        if failed := llama_cpp.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode returned {failed}")
        logits = (llama_cpp.llama_get_logits_ith(self.context, place) for place in last)
        return [int(np.ctypeslib.as_array(values, (self.vocab,)).argmax()) for values in logits]


run(prepare, load)
