"""onnxruntime-genai, with files of its own model builder, which supports LLaMA but not GPT-2.

Weights in 8 and 4 bits have a scale for each 32 inputs, and activations are quantized to 8 bits (accuracy level 4).
"""

import json
import math
from pathlib import Path

import onnxruntime_genai

from peers.common import Clock, convert, run

PRECISION = {"f32": "fp32", "int8 b32": "int8", "int4 b32": "int4"}


def prepare(task):
    what = ["-i", task.checkpoint, "-o", task.directory, "-e", "cpu", "-p", PRECISION[task.format]]
    if task.format != "f32":
        what += ["--extra_options", "block_size=32", "accuracy_level=4"]
    convert("onnxruntime_genai.models.builder", *what, "-c", f"{task.directory}/cache")
    path = Path(task.directory, "genai_config.json")
    config = json.loads(path.read_text())
    config["model"]["decoder"]["session_options"]["intra_op_num_threads"] = task.threads
    path.write_text(json.dumps(config))


def load(task):
    return Engine(task)


class Engine:
    def __init__(self, task):
        self.directory = Path(task.directory)
        self.model = onnxruntime_genai.Model(task.directory)

    @property
    def weights(self):
        """Bytes without tensors that only lookups use: an embedding that is not also the head."""
        import onnx  # not during a measured start

        graph = onnx.load(self.directory / "model.onnx", load_external_data=False).graph
        read = {name for node in graph.node if not node.op_type.startswith("Gather") for name in node.input}
        tensors = [tensor for tensor in graph.initializer if tensor.name in read]
        sizes = onnx.helper.tensor_dtype_to_np_dtype
        return sum(math.prod(one.dims) * sizes(one.data_type).itemsize for one in tensors)

    def generate(self, ids, count):
        clock, length = Clock(), len(ids[0]) + count
        parameters = onnxruntime_genai.GeneratorParams(self.model)
        parameters.set_search_options(
            max_length=length, min_length=length, do_sample=False, batch_size=len(ids), num_beams=1
        )
        generator = onnxruntime_genai.Generator(self.model, parameters)
        generator.append_tokens(ids)
        tokens = [[] for _ in ids]
        for _ in range(count):
            generator.generate_next_token()
            for row, token in zip(tokens, generator.get_next_tokens(), strict=True):
                row.append(int(token))
            clock.token()
        return tokens, *clock.seconds()


run(prepare, load)
