"""Decompose-K: C = A B for tiny M, N and huge K, as S partial products and one sum over them.

    P[s] = A[:, K_s] B[K_s, :]      fp32, one program per (tile of C, s, batch)
    C    = epilogue(sum_s P[s])     one program per run of XBLOCK consecutive elements of C

For very few rows and a B contiguous along K (the weight of nn.Linear), one kernel without a split:

    C[m, n] = epilogue(sum_k A[m, k] B[k, n])    one program per (BLOCK_N columns, m)

The partials have their own buffer, so an element becomes final in exactly one place: Inductor fuses
bias, activation, residual and casts onto that store. No atomics: the same bits every run.

Programmatic dependent launch (PDL): both kernels let their successor start early (the sum at once,
or only when the partials are there: then two partial kernels never share an SM) and wait for their
predecessor before the first load of anything it may have written, and before the first store to
memory it may still be reading. The wait is unconditional in every program, so "my predecessor has
finished" carries over a chain of such kernels. Before the wait only a prefetch into L2 is allowed:
L2 is where all SMs meet, so a line fetched too early is updated, never stale.
"""

PREFETCH = r"""
{#- Bulk prefetch into L2, one piece of ``elements`` contiguous elements of B per thread. Threads
    beyond the number of pieces hold copies and stay out. -#}
{%- macro prefetch(pieces, wanted, start, elements) %}
    tl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; setp.lt.u32 p, t, $3;"
        " @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r,r",
        [{{start}},
         tl.zeros(({{pieces}},), tl.int32)
         + ({{elements}}) * (B.dtype.element_ty.primitive_bitwidth // 8),
         tl.where({{wanted}}, {{pieces}}, 0)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
{%- endmacro %}
"""

PARTIAL = (
    PREFETCH
    + r"""
{% set in_m, in_n = "(rm[:, None] < M)", "(rn[None, :] < N)" %}
{% set masks_a = ([] if EVEN_M else [in_m]) + ([] if EVEN_K else ["(rk[None, :] < K)"]) %}
{% set masks_b = ([] if EVEN_K else ["(rk[:, None] < K)"]) + ([] if EVEN_N else [in_n]) %}
{% set masks_c = ([] if EVEN_M else [in_m]) + ([] if EVEN_N else [in_n]) %}
{{def_kernel("A", "B")}}
    M = {{size("A", -2)}}
    N = {{size("B", -1)}}
    K = {{size("A", -1)}}
{% if PDL %}
    tl.extra.cuda.gdc_launch_dependents()
{% endif %}
    tile = tl.program_id(0)
    idx_s = tl.program_id(1).to(INDEX)
    tiles_m = tl.cdiv(M, BLOCK_M)
    rm = ((tile % tiles_m) * BLOCK_M + tl.arange(0, BLOCK_M)).to(INDEX)
    rn = ((tile // tiles_m) * BLOCK_N + tl.arange(0, BLOCK_N)).to(INDEX)
{% if K_SPLIT %}
    k_split = K_SPLIT
{% else %}
    k_split = tl.cdiv(tl.cdiv(K, SPLITS), BLOCK_K) * BLOCK_K
{% endif %}
    k_first = idx_s * k_split
{% if BATCHED %}
    idx_b = tl.program_id(2).to(INDEX)
    A += idx_b * {{stride("A", 0)}}
    B += idx_b * {{stride("B", 0)}}
{% endif %}
{# Each program asks for its part of B: pieces of 64 contiguous rows, or one run per column. #}
{% if PREFETCH_ROWS %}
    piece = tl.arange(0, PIECES)
    first = k_first + piece * 64
{{prefetch("PIECES", "(piece * 64 < k_split) & (first + 64 <= K)", "B + first * N", "64 * N")}}
{% elif PREFETCH_COLUMNS %}
{{prefetch("BLOCK_N", "(rn < N) & (k_first + k_split <= K)",
           "B + rn * " ~ stride("B", -1) ~ " + k_first", "k_split")}}
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
{% if ROUND_TF32 %}
{# Tensor cores cut fp32 off to tf32; the library rounds, and cutting is 2.6 times less exact. #}
{% for x in ("a", "b") %}
        bits = {{x}}.to(tl.int32, bitcast=True) + 0x1000
        {{x}} = tl.where({{x}} == {{x}}, (bits & -0x2000).to(tl.float32, bitcast=True), {{x}})
{% endfor %}
{% endif %}
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    idx_m = rm[:, None]
    idx_n = rn[None, :]
{# Inductor may want the mask by name, so a full tile has one that is always true. #}
    mask = {{masks_c | join(" & ") if masks_c else "tl.full((BLOCK_M, BLOCK_N), True, tl.int1)"}}
    {{store_output(("idx_s", "idx_b", "idx_m", "idx_n") if BATCHED else ("idx_s", "idx_m", "idx_n"),
                   "acc", "mask", val_shape=("BLOCK_M", "BLOCK_N"))}}
"""
)


def partial_grid(*sizes_and_meta, cdiv):
    """One program per (tile of the output, split, batch). Sizes: S, (batch,) M, N."""
    *sizes, meta = sizes_and_meta
    splits, m, n = sizes[0], sizes[-2], sizes[-1]
    batch = sizes[1] if len(sizes) == 4 else 1
    return (cdiv(m, meta["BLOCK_M"]) * cdiv(n, meta["BLOCK_N"]), splits, batch)


DOT = (
    PREFETCH
    + r"""
{% set masks = ([] if EVEN_N else ["(idx_n[:, None] < N)"]) + ([] if EVEN_K else ["(k < K)"]) %}
{{def_kernel("A", "B")}}
    N = {{size("B", -1)}}
    K = {{size("A", -1)}}
    idx_n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(INDEX)
    idx_m = tl.program_id(1) + tl.zeros((BLOCK_N,), INDEX)
    row = A + tl.program_id(1).to(INDEX) * {{stride("A", -2)}}
{% if PREFETCH %}
{{prefetch("BLOCK_N", "(idx_n < N) & (tl.program_id(1) == 0)",
           "B + idx_n * " ~ stride("B", -1), "K")}}
{% endif %}
{% if PDL %}
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
{% endif %}
    products = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for first in range(0, K, BLOCK_K):
        k = (first + tl.arange(0, BLOCK_K)).to(INDEX)[None, :]
        a = tl.load(row + k * {{stride("A", -1)}}
                    {%- if not EVEN_K %}, mask=k < K, other=0.0{% endif %})
        b = tl.load(B + k * {{stride("B", -2)}} + idx_n[:, None] * {{stride("B", -1)}}
                    {%- if masks %}, mask={{masks | join(" & ")}}, other=0.0{% endif %})
        products += a.to(tl.float32) * b.to(tl.float32)
    acc = tl.sum(products, 1)
    mask = {{"tl.full((BLOCK_N,), True, tl.int1)" if EVEN_N else "idx_n < N"}}
    {{store_output(("idx_m", "idx_n"), "acc", "mask", val_shape=("BLOCK_N",))}}
"""
)


def dot_grid(m, n, meta, *, cdiv):
    """One program per (BLOCK_N columns of B, row of A)."""
    return (cdiv(n, meta["BLOCK_N"]), m, 1)


REDUCE = r"""
{% set in_s, in_x = "(s[:, None] < SPLITS)", "(idx_x[None, :] < XNUMEL)" %}
{% set masks = ([] if SPLITS == RBLOCK else [in_s]) + ([] if EVEN_X else [in_x]) %}
{{def_kernel("P")}}
    M = {{size("P", -2)}}
    N = {{size("P", -1)}}
    XNUMEL = {{size("P", 1) if BATCHED else 1}} * M * N
{% if PDL and EARLY %}
    tl.extra.cuda.gdc_launch_dependents()
{% endif %}
    idx_x = (tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)).to(INDEX)
    s = tl.arange(0, RBLOCK).to(INDEX)
{% if PDL %}
    tl.extra.cuda.gdc_wait()
{% if not EARLY %}
    tl.extra.cuda.gdc_launch_dependents()
{% endif %}
{% endif %}
    partials = tl.load(P + s[:, None] * XNUMEL + idx_x[None, :]
                       {%- if masks %}, mask={{masks | join(" & ")}}, other=0.0{% endif %})
    acc = tl.sum(partials, 0)
{# C is contiguous: its own index is idx_x. Row and column are for other operands of the epilogue,
   whose strides may be of any size. #}
    idx_n = (idx_x % N).to(tl.int64)
    idx_m = ((idx_x // N){{" % M" if BATCHED else ""}}).to(tl.int64)
{% if BATCHED %}
    idx_b = (idx_x // (M * N)).to(tl.int64)
{% endif %}
{# As above: an epilogue names the mask. #}
    mask = {{"tl.full((XBLOCK,), True, tl.int1)" if EVEN_X else "idx_x < XNUMEL"}}
    {{store_output(("idx_b", "idx_m", "idx_n") if BATCHED else ("idx_m", "idx_n"),
                   "acc", "mask", val_shape=("XBLOCK",))}}
"""


def reduce_grid(*sizes_and_meta, cdiv):
    """One program per XBLOCK consecutive elements of the flattened output. Sizes: (batch,) M, N."""
    *sizes, meta = sizes_and_meta
    numel = 1
    for size in sizes:
        numel *= size
    return (cdiv(numel, meta["XBLOCK"]), 1, 1)
