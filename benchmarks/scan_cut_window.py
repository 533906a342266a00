import multiprocessing
import os
import sys
import time

mode, out = sys.argv[1], sys.argv[2]
T0 = time.time()
CONFIGS = {
 "sum 2^28": ["16384,4,40,1","16384,4,40,4","16384,4,85,4","8192,4,40,1","8192,4,40,2","32768,8,40,1","32768,8,40,4","16384,4,28,4"],
 "cummax 2^27": ["4096,4,40,1","4096,4,40,2","4096,4,85,1","2048,4,40,1","8192,8,40,4"],
 "lse 2^26": ["8192,4,40,1","4096,4,40,1","8192,4,85,1"],
 "int64 2^27": ["4096,4,40,1","4096,4,40,2","2048,4,40,1","8192,8,40,4"],
 "affine 2^24": ["4096,4,40,1","4096,4,40,2","2048,4,40,1"],
 "bf16 2^28": ["16384,4,40,1","16384,4,40,4","32768,8,40,4"],
 "sum 2^24": ["4096,4,40,1","8192,4,40,1","8192,4,40,2","16384,4,40,4"],
 "rev 2^28": ["16384,4,40,1","16384,4,40,4","8192,4,40,2"],
 "lse rows": ["2048,4,0,1","4096,4,0,1"],
 "sum 2^20": ["4096,4,40,1","2048,4,40,1"],
}
def setup(case):
    import torch

    from inductor_ext.ops import _scan_programs as P

    F, B, I = torch.float32, torch.bfloat16, torch.int64
    op, size = case.split()
    n = None if size == "rows" else 1 << int(size[2:])
    shape = (4096, 16384) if n is None else (n,)
    prog = {
        "sum": lambda: P.scan(F, False, "sum", False, False, F),
        "rev": lambda: P.scan(F, False, "sum", True, False, F),
        "int64": lambda: P.scan(I, False, "sum", False, False, I),
        "bf16": lambda: P.scan(B, False, "sum", False, False, B),
        "cummax": lambda: P.scan(F, False, "cummax", False, False, F, True),
        "lse": lambda: P.scan(F, False, "logsumexp", False, False, F),
        "affine": lambda: P.recurrence(F, False, False),
    }[op]()
    torch.manual_seed(0)
    if op == "int64":
        ins = [torch.randint(-1000, 1000, shape, device="cuda")]
    elif op == "affine":
        ins = [torch.rand(shape, device="cuda"), torch.randn(shape, device="cuda")]
    else:
        ins = [torch.randn(shape, device="cuda").to(B if op == "bf16" else F)]
    per = {"sum": 8, "rev": 8, "int64": 16, "bf16": 4, "cummax": 16, "lse": 8, "affine": 12}[op]
    eager = {
        "sum": lambda x: x.cumsum(-1),
        "rev": lambda x: x.flip(0).cumsum(0).flip(0),
        "int64": lambda x: x.cumsum(0),
        "bf16": lambda x: x.cumsum(0),
        "cummax": lambda x: x.cummax(0),
        "lse": lambda x: x.logcumsumexp(-1),
        "affine": None,
    }[op]
    return prog, ins, per * ins[0].numel(), eager


def runner(prog, ins, spec):
    import torch
    from inductor_ext.templates import scan_launch as S

    time_, warps, group, pieces, *regs = (int(v) for v in spec.split(","))
    group, depth = (40, 9) if group == 40 else (28, 13) if group == 28 else (85, 0) if group else (0, 0)
    tile = S.Tiling(1, time_, warps, group, True, group == 0, pieces, depth)
    class With:
        def __init__(s, k):
            s.k = k

        def __getitem__(s, grid):
            return lambda **kw: s.k[grid](**kw, **({"maxnreg": regs[0]} if regs else {}))

    def call(*ins):
        outs = [torch.empty(ins[0].shape, dtype=d, device="cuda") for d in prog.outputs]
        S.wrap_triton = With
        S.launch(prog, ins, outs, ins[0].ndim - 1, tile)
        return tuple(outs)

    return call


def check(job):
    case, spec = job
    import torch

    try:
        prog, ins, _, eager = setup(case)
        call = runner(prog, ins, spec)
        t = time.time()
        y = call(*ins)
        torch.cuda.synchronize()
        t = time.time() - t
        op = case.split()[0]
        if op == "affine":
            a, b = ins
            h = y[0]
            err = (
                (h[1:].double() - (a[1:].double() * h[:-1] + b[1:])).norm() / h.double().norm()
            ).item()
        else:
            truth = eager(ins[0] if op == "int64" else ins[0].double())
            truth = truth[0] if op == "cummax" else truth
            err = ((y[0].to(truth.dtype) - truth).double().norm() / truth.double().norm()).item()
            if op == "cummax":
                err += (y[1] != eager(ins[0])[1]).sum().item()
            del truth
        same = all(all(map(torch.equal, call(*ins), y)) for _ in range(2))
        return f"{case} {spec} err {err:.2e} same {same} compile+run {t:.1f}s"
    except Exception as e:
        return f"{case} {spec} FAILED {type(e).__name__} {str(e)[:200]}"


def main():
    jobs = [(c, s) for c, ss in CONFIGS.items() for s in ss]
    if mode == "prep":
        ctx = multiprocessing.get_context("spawn")
        with ctx.Pool(2) as pool, open(f"{out}/prep.txt", "a") as f:
            for line in pool.imap_unordered(check, jobs):
                print(line, file=f, flush=True)
        return
    import torch

    from benchmarks.mhc import Timer
    from inductor_ext import measure

    timer = Timer(5)
    for case, specs in CONFIGS.items():
        prog, ins, nbytes, eager = setup(case)
        sets = measure.rotate(ins)
        floor = measure.copy_floor_us(nbytes)
        line = [f"{case}: floor {floor:.1f}"]
        with open(f"{out}/time.txt", "a") as f:
            print(
                f"{case}: floor {floor:.1f} us  [{time.time() - T0:.0f}s]",
                end=" ",
                file=f,
                flush=True,
            )
            if eager is not None and case not in ("cummax 2^27",):
                us = timer(eager, sets)
                print(f"eager {us:.1f} {100 * floor / us:.1f}%", end=" ", file=f, flush=True)
            for spec in specs:
                try:
                    us = timer(runner(prog, ins, spec), sets)
                    print(f"| {spec} {us:.1f} {100 * floor / us:.1f}%", end=" ", file=f, flush=True)
                except Exception as e:
                    print(f"| {spec} {type(e).__name__}", end=" ", file=f, flush=True)
            print(file=f, flush=True)
        del sets
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
