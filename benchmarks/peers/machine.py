"""Measure the machine's best speed: bytes read and operations done per second, with all its processors.

    python -P -m peers.machine THREADS

For bytes, torch reads 1 GiB of float32 by the fastest of three reductions. For operations, it computes the product
[1024, 2048] x [2048, 8192]. Each is the best of several runs.
"""

import json
import sys
import time

import torch


def best(way, times=5):
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        way()
        taken.append(time.perf_counter() - began)
    return min(taken)


def main():
    torch.set_num_threads(int(sys.argv[1]))
    rates, rows = {}, torch.ones(2**28)
    rates["read"] = rows.nbytes / min(best(way) for way in (rows.sum, rows.amax, lambda: rows.dot(rows)))
    for name, dtype in dict(f32=torch.float32, bf16=torch.bfloat16).items():
        x, weight = torch.randn(1024, 2048, dtype=dtype), torch.randn(8192, 2048, dtype=dtype)
        rates[name] = 2 * 1024 * 2048 * 8192 / best(lambda x=x, weight=weight: x @ weight.T)
    print(json.dumps(rates))


if __name__ == "__main__":
    main()
