"""`PrefixIndex`: which slots hold the rows of which tokens, and the longest beginning of a prompt among them.

It is a trie. Its edges are runs of tokens, each as long as a page has whole tokens. A node knows the slots whose tokens
lead to it or through it. A dict finds nodes: it hashes a run and then compares its tokens, so no hash is trusted.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import NamedTuple

__all__ = ["PrefixIndex", "PrefixMatch"]


class PrefixMatch(NamedTuple):
    """The longest known beginning of some tokens: its length, 0 if there is none, and the slots that have it."""

    length: int
    slots: Set[int]


class _Node:
    __slots__ = ("children", "run", "slots")

    def __init__(self, run: tuple[int, ...]) -> None:
        self.run = run
        self.slots: set[int] = set()
        self.children: dict[tuple[int, ...], _Node] = {}


class PrefixIndex:
    """Tokens of slots, in whole runs. Not thread-safe.

    Parameters
    ----------
    run_tokens : int
        Tokens of a run, at least 1: what matches is a multiple of it.
    """

    def __init__(self, run_tokens: int) -> None:
        self.run_tokens = run_tokens
        self._root = _Node(())
        self._paths: dict[int, list[_Node]] = {}

    def __len__(self) -> int:
        """Slots with at least one run."""
        return len(self._paths)

    def length(self, slot: int) -> int:
        """Tokens of a slot that can match."""
        return len(self._paths.get(slot, ())) * self.run_tokens

    def extend(self, slot: int, tokens: Sequence[int]) -> None:
        """Note the next tokens of a slot, behind those it has; what fills no run is ignored."""
        for start in range(0, len(tokens) - self.run_tokens + 1, self.run_tokens):
            path = self._paths.setdefault(slot, [])
            run = tuple(tokens[start : start + self.run_tokens])
            siblings = (path[-1] if path else self._root).children
            node = siblings.get(run)
            if node is None:
                node = siblings[run] = _Node(run)
            node.slots.add(slot)
            path.append(node)

    def remove(self, slot: int) -> None:
        """Forget a slot, if it is known."""
        parent = self._root
        for node in self._paths.pop(slot, ()):
            node.slots.remove(slot)
            if not node.slots:  # nor has any node behind it: all slots there passed here
                del parent.children[node.run]
                return
            parent = node

    def match(self, tokens: Sequence[int]) -> PrefixMatch:
        """Find the longest beginning of `tokens`, in whole runs, that a slot has."""
        node, length = self._root, 0
        while length + self.run_tokens <= len(tokens):
            child = node.children.get(tuple(tokens[length : length + self.run_tokens]))
            if child is None:
                break
            node, length = child, length + self.run_tokens
        return PrefixMatch(length, frozenset(node.slots))

    def covering(self, slot: int) -> Set[int]:
        """Other slots that have all tokens of this one, and perhaps more; none if it has no tokens."""
        path = self._paths.get(slot)
        return path[-1].slots - {slot} if path else frozenset()

    def covered(self, slot: int) -> Set[int]:
        """Other slots whose tokens are all a beginning of this one's."""
        path = self._paths.get(slot, [])
        return {
            other
            for other, nodes in self._paths.items()
            if other != slot and len(nodes) <= len(path) and nodes[-1] is path[len(nodes) - 1]
        }
