"""What two dependent kernels can reach at every shape of `relu_bf16`: a floor from measurements.

A call is two serial stages, each with a launch that waits for the one before, a trip to memory and
a hand-over to the next. What that takes apart from bytes is timed on the card: the plugin's own two
kernels where there is next to nothing to read (the same M and N, K = 1024), as independent calls
and as a dependent chain. A longer K can at best add its bytes at the speed of a large copy:

    floor(K) = time(1024) + (bytes(K) - bytes(1024)) / copy

``python -m benchmarks.decompose_k_floor --measure`` takes those four times on a card (a few
seconds). Without ``--measure`` no card is needed: the table is made of them and of
results/decompose_k.csv, with what the hand-written decomposition's time over the floor is: the
largest speed-up over it that any such pair could show there.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks import common, decompose_k

RESULTS = Path(__file__).parent / "results"
SHORT = 1024  # the smallest K that is split at all
SUITE = "relu_bf16"


def _short(mn: int) -> decompose_k.Case:
    return decompose_k.Case(SUITE, mn, mn, SHORT, "bfloat16", "kn", "relu")


def measure_latency(repeats: int) -> list[dict[str, Any]]:
    """Times of the two kernels at K = 1024, a row per M = N, in us."""
    import torch

    from inductor_ext import measure

    decompose_k._settings()
    rows = []
    for mn in sorted({c.m for c in decompose_k.SUITES[SUITE]}):
        torch._dynamo.reset()
        inputs = decompose_k.draw(_short(mn))
        call, choice = decompose_k.build(_short(mn), "ours", inputs)
        row: dict[str, Any] = {"mn": mn, "choice": choice, "copy": measure.ceilings().copy}
        for kind in common.KINDS:
            timed = measure.compare({"ours": call}, inputs, repeats=repeats, chained=bool(kind))
            if isinstance(error := timed["ours"], str):
                raise RuntimeError(error)
            row[f"{kind}us"] = error.us
        rows.append(row)
    return rows


def floors(latency: list[dict[str, str]], rows: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Of every shape: the floor, ours, the decomposition, and its time over the floor and ours."""
    by_mn = {int(row["mn"]): row for row in latency}
    out = []
    for row in rows:
        if row["suite"] != SUITE:
            continue
        short = by_mn[int(row["m"])]
        more = (int(row["bytes"]) - _short(int(row["m"])).bytes) / float(short["copy"])
        line: dict[str, Any] = {"case": row["case"]}
        for kind in common.KINDS:
            floor = float(short[f"{kind}us"]) + more
            ours, theirs = (float(row[f"{c}_{kind}us"]) for c in ("ours", "decomposition"))
            line |= {f"{kind}floor_us": floor, f"{kind}ours_us": ours}
            line |= {f"{kind}decomposition_us": theirs, f"{kind}reached": theirs / ours}
            line |= {f"{kind}reachable": theirs / floor}
        out.append(line)
    return out


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        "benchmarks.decompose_k_floor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--measure", action="store_true", help="time the latency first, on a card")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the files")
    args = parser.parse_args()
    latency = args.out / "decompose_k_latency.csv"
    if args.measure:
        measured = measure_latency(decompose_k.REPEATS)
        table = common.CsvFile(latency, list(measured[0]))
        for row in measured:
            table.write(row)
        table.close()
        meta = common.metadata("benchmarks.decompose_k_floor")
        common.write_json(latency.with_suffix(".json"), meta)
    rows = floors(common.read_csv(latency), common.read_csv(RESULTS / "decompose_k.csv"))
    table = common.CsvFile(args.out / "decompose_k_floor.csv", list(rows[0]))
    for row in rows:
        table.write(row)
    table.close()
    for kind, label in common.KINDS.items():
        reached, reachable = (
            common.geometric_mean(row[f"{kind}{name}"] for row in rows)
            for name in ("reached", "reachable")
        )
        print(f"{label}: {reached:.2f}x over the decomposition; at the floor {reachable:.2f}x")


if __name__ == "__main__":
    main()
