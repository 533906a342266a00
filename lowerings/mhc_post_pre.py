"""``mhc_post_pre``: the streams behind a layer and the next layer's input, as one operation.

Where the streams that ``mhc_post`` writes are those that ``mhc_pre`` projects, their gradients from
both are one sum. It follows the other two passes and joins the operations that they put in, whose
operands nobody writes to; calls of a program's own stay as they are.
"""

from __future__ import annotations

import operator
from typing import Any

from inductor_ext.lowerings import mhc_post as _mhc_post  # noqa: F401  (its pass comes first)
from inductor_ext.lowerings import mhc_pre as _mhc_pre  # noqa: F401
from inductor_ext.lowerings import mhc_sites, sites

from inductor_ext import compat_pre_grad, registry, shadow

NAME = "mhc_post_pre"


def _calls(graph: Any, name: str) -> list[Any]:
    return [
        n
        for n in graph.nodes
        if n.op == "call_function"
        and mhc_sites.FOUND in n.meta
        and getattr(n.target, "namespace", "") == "inductor_ext"
        and n.target._schema.name == f"inductor_ext::{name}"
    ]


def _recording(graph: Any) -> dict[Any, bool]:
    """Whether gradients are recorded where a node runs."""
    found, now = {}, True
    for node in graph.nodes:
        if compat_pre_grad.sets_gradients(node.target):
            now = bool(node.args[0])
        found[node] = now
    return found


def _place(order: dict[Any, int], post: Any, pre: Any) -> Any:
    """Where both can be computed. Raises NoSite."""
    if all(order[user] >= order[pre] for user in post.users):
        return pre
    if all(order[n] < order[post] for n in pre.all_input_nodes if n is not post):
        return post
    early = min(post.users, key=order.__getitem__)
    raise sites.NoSite(f"{early.name} uses the streams before the projection's inputs exist")


def rewrite(graph: Any) -> None:
    """The pass over a graph in front of AOTAutograd, behind those of the parts."""
    pairs = [(n.args[0], n) for n in _calls(graph, "mhc_pre")]
    posts = set(_calls(graph, "mhc_post"))
    pairs = [(post, pre) for post, pre in pairs if post in posts]
    if not pairs:
        return
    records, joined = _recording(graph), set()
    mode = compat_pre_grad.fake_mode_of(shadow.value_of(pairs[0][0]))
    with compat_pre_grad.replaying(mode):
        for post, pre in pairs:
            site = sites.describe(NAME, post, shadow.value_of(post))
            order = {node: i for i, node in enumerate(graph.nodes)}
            try:
                if post in joined:
                    raise sites.NoSite("another projection of these streams is joined")
                if records[post] != records[pre]:
                    raise sites.NoSite("gradients are recorded for a part of it only")
                _join(graph, post, pre, _place(order, post, pre))
            except sites.NoSite as reason:
                sites.leave(NAME, site, str(reason))
            else:
                joined.add(post)
                why = "one operation, in whose gradient that of the streams is one sum"
                sites.fired(NAME, NAME, site, why)
    graph.lint()
    graph.owning_module.recompile()


def _join(graph: Any, post: Any, pre: Any, place: Any) -> None:
    program = sites.Program(graph)
    program.before(place)
    whole = program.call(mhc_sites.operation(NAME), *post.args, *pre.args[1:])
    results = [program.call(operator.getitem, whole, i) for i in range(6)]
    for item in list(pre.users):
        item.replace_all_uses_with(results[item.args[1] + 1])
        graph.erase_node(item)
    graph.erase_node(pre)
    post.replace_all_uses_with(results[0])
    graph.erase_node(post)
    for result in results:
        if not result.users:
            graph.erase_node(result)


registry.register(
    registry.Lowering(
        NAME,
        passes={"pre_grad": rewrite},
    )
)
