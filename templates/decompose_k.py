"""Decompose-K: C = A B for tiny M, N and huge K, as S partial products and one sum over them.

    P[s] = A[:, K_s] B[K_s, :]      fp32, one program per (tile of C, s, batch)
    C    = epilogue(sum_s P[s])     one program per run of XBLOCK consecutive elements of C

The partials have their own buffer, so an element becomes final in exactly one place: Inductor fuses
bias, activation, residual and casts onto that store. No atomics: the same bits every run.

Programmatic dependent launch (PDL): both kernels let their successor start early and wait for their
predecessor before the first load of anything it may have written, and before the first store to
memory it may still be reading. The wait is unconditional in every program, so "my predecessor has
finished" carries over a chain of such kernels.
"""

PARTIAL = r"""
{% set masks_a = ([] if EVEN_M else ["(rm[:, None] < M)"]) + ([] if EVEN_K else ["(rk[None, :] < K)"]) %}
{% set masks_b = ([] if EVEN_K else ["(rk[:, None] < K)"]) + ([] if EVEN_N else ["(rn[None, :] < N)"]) %}
{% set masks_c = ([] if EVEN_M else ["(rm[:, None] < M)"]) + ([] if EVEN_N else ["(rn[None, :] < N)"]) %}
{{def_kernel("A", "B")}}
    M = {{size("A", -2)}}
    N = {{size("B", -1)}}
    K = {{size("A", -1)}}
{% if PDL %}
    tl.extra.cuda.gdc_launch_dependents()
{% endif %}
    tile = tl.program_id(0)
    split = tl.program_id(1).to(INDEX)
    tiles_m = tl.cdiv(M, BLOCK_M)
    rm = ((tile % tiles_m) * BLOCK_M + tl.arange(0, BLOCK_M)).to(INDEX)
    rn = ((tile // tiles_m) * BLOCK_N + tl.arange(0, BLOCK_N)).to(INDEX)
{% if K_SPLIT %}
    k_split = K_SPLIT
{% else %}
    k_split = tl.cdiv(tl.cdiv(K, SPLITS), BLOCK_K) * BLOCK_K
{% endif %}
    k_first = split * k_split
{% if BATCHED %}
    batch = tl.program_id(2).to(INDEX)
    A += batch * {{stride("A", 0)}}
    B += batch * {{stride("B", 0)}}
{% endif %}
{% if PDL %}
    tl.extra.cuda.gdc_wait()
{% endif %}
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, {{"K_SPLIT" if K_SPLIT else "k_split"}}, BLOCK_K):
        rk = k_first + k + tl.arange(0, BLOCK_K)
        a = tl.load(A + rm[:, None] * {{stride("A", -2)}} + rk[None, :] * {{stride("A", -1)}}
                    {%- if masks_a %}, mask={{masks_a | join(" & ")}}, other=0.0{% endif %})
        b = tl.load(B + rk[:, None] * {{stride("B", -2)}} + rn[None, :] * {{stride("B", -1)}}
                    {%- if masks_b %}, mask={{masks_b | join(" & ")}}, other=0.0{% endif %})
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    idx_m = rm[:, None]
    idx_n = rn[None, :]
{% if masks_c %}
    mask = {{masks_c | join(" & ")}}
{% endif %}
    {{store_output(("split", "batch", "idx_m", "idx_n") if BATCHED else ("split", "idx_m", "idx_n"),
                   "acc", "mask" if masks_c else None, val_shape=("BLOCK_M", "BLOCK_N"))}}
"""


def partial_grid(*sizes_and_meta, cdiv):
    """One program per (tile of the output, split, batch). Sizes: S, (batch,) M, N."""
    *sizes, meta = sizes_and_meta
    splits, m, n = sizes[0], sizes[-2], sizes[-1]
    batch = sizes[1] if len(sizes) == 4 else 1
    return (cdiv(m, meta["BLOCK_M"]) * cdiv(n, meta["BLOCK_N"]), splits, batch)


REDUCE = r"""
{{def_kernel("P")}}
    XNUMEL = {{size(None, 0)}}
{% if PDL %}
    tl.extra.cuda.gdc_launch_dependents()
{% endif %}
    x = (tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)).to(INDEX)
    s = tl.arange(0, RBLOCK).to(INDEX)
{% set masks = ([] if SPLITS == RBLOCK else ["(s[:, None] < SPLITS)"]) + ([] if EVEN_X else ["(x[None, :] < XNUMEL)"]) %}
{% if PDL %}
    tl.extra.cuda.gdc_wait()
{% endif %}
    partials = tl.load(P + s[:, None] * XNUMEL + x[None, :]
                       {%- if masks %}, mask={{masks | join(" & ")}}, other=0.0{% endif %})
    acc = tl.sum(partials, 0)
{% if not EVEN_X %}
    mask = x < XNUMEL
{% endif %}
    {{store_output(("x",), "acc", None if EVEN_X else "mask", val_shape=("XBLOCK",))}}
"""


def reduce_grid(numel, meta, *, cdiv):
    """One program per XBLOCK consecutive elements of the flattened output."""
    return (cdiv(numel, meta["XBLOCK"]), 1, 1)
