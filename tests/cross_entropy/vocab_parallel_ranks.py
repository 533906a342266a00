"""What the ranks of test_vocab_parallel.py do: run as a program, it imports once and then forks the
ranks of a job for each line of input, {"check": name, "world": ranks, "folder": ..., "args": ...,
"device": "cpu" or "cuda"}: joined by gloo, or by NCCL with a card each.

A check's value, or its traceback, goes into a file of the rank.
"""

import contextlib
import datetime
import json
import os
import signal
import sys
import traceback

import torch
import torch.distributed as dist
import vocab_parallel_checks as checks
import vocab_parallel_dtensors as dtensors


def main():
    torch.set_num_threads(1)
    for line in sys.stdin:
        job = json.loads(line)
        children = [fork(job, rank) for rank in range(job["world"])]
        for child in children:
            os.waitpid(child, 0)
        print("done", flush=True)


def fork(job, rank):
    child = os.fork()
    if child:
        return child
    signal.alarm(100)  # a rank that waits for ever is killed
    folder, world = job["folder"], job["world"]
    result = ["error", "nothing"]
    try:
        backend = "gloo"
        if job["device"] == "cuda":
            backend = "nccl"
            torch.cuda.set_device(rank)
            torch.set_default_device(f"cuda:{rank}")
        dist.init_process_group(
            backend, init_method=f"file://{folder}/store", rank=rank, world_size=world,
            timeout=datetime.timedelta(seconds=30),
        )  # fmt: skip
        torch.manual_seed(0)
        home = next(m for m in (checks, dtensors) if hasattr(m, job["check"]))
        result = ["value", getattr(home, job["check"])(rank, world, *job["args"])]
        with contextlib.suppress(Exception):
            dist.barrier()
    except BaseException:
        result = ["error", traceback.format_exc()]
    with open(f"{folder}/rank{rank}.json", "w") as out:
        json.dump(result, out)
    os._exit(0)


if __name__ == "__main__":
    main()
