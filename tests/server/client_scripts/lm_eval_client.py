"""lm-eval of a server and of its checkpoint: `lm_eval_client.py URL CHECKPOINT TASKS LENGTH`, printed as JSON.

TASKS is a directory of tasks, whose data are in the current directory, and LENGTH the model's positions.
"""

import json
import sys

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager


def evaluated(kind, **arguments):
    """Return the metrics of each task, and what the model answered to each of its documents."""
    found = simple_evaluate(kind, arguments, TASKS, task_manager=MANAGER, bootstrap_iters=0)
    return {
        task: dict(
            metrics={name: value for name, value in metrics.items() if isinstance(value, float)},
            answers=[sample["filtered_resps"] for sample in found["samples"][task]],
        )
        for task, metrics in found["results"].items()
    }


url, checkpoint, tasks, length = sys.argv[1:]
MANAGER = TaskManager(include_path=tasks, include_defaults=False)
TASKS = MANAGER.all_tasks
served = dict(model="tiny-kjv", base_url=f"{url}/v1/completions", max_length=int(length))
batches = dict(tokenizer=checkpoint, batch_size=4, num_concurrent=2)
# Of a server's positions, lm-eval keeps one for the token that the server makes, and in long texts one more. With two
# positions less, a checkpoint has the same windows.
local = dict(pretrained=checkpoint, dtype="float32", device="cpu", max_length=int(length) - 2, batch_size=4)
print(json.dumps(dict(
    hf=evaluated("hf", **local),
    huggingface=evaluated("local-completions", tokenizer_backend="huggingface", **batches, **served),
    remote=evaluated("local-completions", tokenizer_backend="remote", **served),
)))  # fmt: skip
