"""What the machine can do at best: bytes read and operations done in a second, with all its processors.

    python -P -m peers.machine THREADS

Bytes are those of a sum over 1 GiB of float32, operations those of a product [1024, 2048] x [2048, 8192], both by
torch, the best of several.
"""

import json
import sys
import time

import torch


def best(way, times=7):
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        way()
        taken.append(time.perf_counter() - began)
    return min(taken)


def main():
    torch.set_num_threads(int(sys.argv[1]))
    rates, rows = {}, torch.ones(2**28)
    rates["read"] = rows.nbytes / best(rows.sum)
    for name, dtype in dict(f32=torch.float32, bf16=torch.bfloat16).items():
        x, weight = torch.randn(1024, 2048, dtype=dtype), torch.randn(8192, 2048, dtype=dtype)
        rates[name] = 2 * 1024 * 2048 * 8192 / best(lambda x=x, weight=weight: x @ weight.T)
    print(json.dumps(rates))


if __name__ == "__main__":
    main()
