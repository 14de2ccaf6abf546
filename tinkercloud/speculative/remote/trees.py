"""Trees of drafted tokens: several guesses at how a sample goes on that share beginnings."""

from collections.abc import Sequence

from tinkercloud.speculative.remote.messages import BadMessage


def paths_of(
    tokens: Sequence[int], parents: Sequence[int], limit: int
) -> tuple[tuple[int, ...], ...]:
    """From its roots to its leaves, in the leaves' order; () where there are no tokens. Raises
    BadMessage for what is no tree, or has more than `limit` leaves.

    tokens, parents (N,): a parent comes before its children, -1 for those that come first. No
    parents: one path.
    """
    if not parents:
        return (tuple(tokens),) if tokens else ()
    if len(parents) != len(tokens):
        raise BadMessage(f"{len(tokens)} drafted tokens with {len(parents)} parents")
    paths: list[tuple[int, ...]] = []
    has_children = [False] * len(tokens)
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if not -1 <= parent < node:
            raise BadMessage(f"drafted token {node} has the parent {parent}")
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
        if parent >= 0:
            has_children[parent] = True
    leaves = tuple(path for path, inner in zip(paths, has_children, strict=True) if not inner)
    if len(leaves) > limit:
        raise BadMessage(f"a tree of {len(leaves)} leaves; at most {limit}")
    return leaves


def tree_of(chains: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Tokens and parents of the tree whose paths the chains are; their common beginnings once."""
    tokens: list[int] = []
    parents: list[int] = []
    nodes: dict[tuple[int, int], int] = {}
    for chain in chains:
        parent = -1
        for token in chain:
            node = nodes.get((parent, token))
            if node is None:
                node = nodes[parent, token] = len(tokens)
                tokens.append(token)
                parents.append(parent)
            parent = node
    return tokens, parents
