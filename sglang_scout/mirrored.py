"""A tree core that is opaque, telling the Runtime what happens to it: what SGLang's Rust core needs.

Everything goes through `UnifiedTreeCoreInterface`, in front of which `Mirrored` sits, so the same code runs above
either core (the tests run it above the Python core, where the truth can be read). The mirror holds the nodes whose KV
is on the device and nothing else: a node that lives on in the host tier only is forgotten, and is new when it is loaded
back.

    structure    a walk that ends at a node we do not know has split or inserted something on the way: the core is asked
                 for the path (`collect_path_info`), and what is new in it is taken in. A new node in front of a known
                 one is its prefix; which one that is, its first page says
    tokens       each node's own, 4 bytes each where that is enough: for that page, and to say where a leaf is to be cut
                 (`_trim`)
    stamps       our own clock, which moves as SGLang's does: LRU's order is the order of walks
    locks        by the node that anchors them; one that is not on the device is held by its deepest ancestor there
    victims      named by the index, checked against the core's path and sizes before the core hears of them: it would
                 panic on one that is locked or no leaf, and a panic is for good. On any doubt the core goes by its own
                 LRU, until the tree is reset
"""

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from msgspec.structs import astuple
from numpy.typing import NDArray
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import (
    EvictDeviceNextNodeResult,
    UnifiedTreeCoreInterface,
)

from radix_policy.nodes import Node, NodeTable
from sglang_scout.bridge import Bridge

# What is cut off into the host tier stays there as a node of its own, and write-back waits for each copy: not for a few
# tokens at a time.
HOST_QUANTUM = 256
_NO_SPACE = (None, None)
_NARROW = 1 << 31  # token ids below, which no vocabulary reaches, take 4 bytes

Ids = NDArray[np.int64]
Tokens = Callable[[int, int], Ids]  # those between two offsets from the root
Space = tuple[str | None, str | None]  # (extra_key, cache_salt)


class Mirrored(UnifiedTreeCoreInterface):
    """In front of a tree core (`class Core(Mirrored, SomeCore)`); `begin_mirror` once that is made."""

    scout: Bridge
    _ready = False

    def begin_mirror(self, bridge: Bridge) -> None:
        """From now on `bridge` hears of everything, and names the victims."""
        self.scout = bridge
        self._table: NodeTable = bridge.runtime.world.nodes
        self._keys: dict[int, bytes] = {}  # tokens of a node (`_pack`)
        self._children: dict[int, int] = {}  # node by its parent and first page (`_place`)
        self._spaces: dict[int, Space] = {}  # of the root's children, where it is not the default one
        self._anchors: dict[int, list[int]] = {}  # locked, and not on the device then: [who holds it there, how often]
        self._clock = 0
        self._page_tokens = int(self.page_size)
        self._walking = False  # the index names the victims of the eviction call in progress
        self._asked = 0  # tokens that call is to free
        self._inserting: Any = None  # key of the insert in progress
        self._loading: str | None = None  # rid of the request that something is loaded back for
        self._ready = True
        self._start()

    def reset(self) -> None:
        super().reset()
        if self._ready:
            self._start()

    def path_to(self, node_id: int) -> Sequence[tuple[Any, ...]]:
        """The nodes from the root, which is left out, to this one: (id, parent, first token, end, tokens on the device
        or None, children). KeyError when the core does not know it."""
        (path,) = self.collect_path_info([node_id])
        return [astuple(info) for info in path]

    def tokens_of(self, node_id: int) -> int:
        """Tokens of the node itself. KeyError when the core does not know it."""
        _, _, start, end, _, _ = self.path_to(node_id)[-1]
        return int(end - start)

    def _start(self) -> None:
        for state in (self._keys, self._children, self._spaces, self._anchors):
            state.clear()
        self._walking = False
        self._inserting = self._loading = None
        self._root: int = self.empty_match_result.best_match_node
        self.scout.reset(self._root)

    # ---- walks ----

    def match_prefix(self, params: Any) -> Any:
        result = super().match_prefix(params)
        scout = self.scout
        if scout.live:
            node = self._walked(result.best_match_node, params.key)
            if node is not None and params.req is not None and scout.is_unmatched(params.req.rid):
                scout.matched(params.req.rid, self._path(node), result.full_kv_hit_length, result.device_prefix_len)
        return result

    def begin_insert(self, params: Any) -> Any:
        self._inserting = params.key
        return self._stepped(super().begin_insert(params))

    def resume_insert(self) -> Any:
        return self._stepped(super().resume_insert())

    def _stepped(self, step: Any) -> Any:
        if step.result is not None and self.scout.live:
            self._walked(step.result.last_device_node, self._inserting)
            self._inserting = None
        return step

    def _walked(self, node_id: int, key: Any) -> int | None:
        """A walk along `key` ended at that node; returns the deepest of its path on the device.

        None after a fault, also one that the Bridge kept to itself.
        """
        self._clock += 2  # a split is older than the walk that made it
        if node_id not in self._table:
            try:
                node_id = self._take_in(node_id, _tokens_of(key), (key.extra_key, key.cache_salt))
            except Exception:
                self.scout.fail("mirror")
                return None
        self.scout.reached(node_id, self._clock)
        return node_id if self.scout.live else None

    def _path(self, node_id: int) -> list[int]:
        """Ids from the root, which is left out, to the node."""
        node: Node | None = self._table[node_id]
        path: list[int] = []
        while node is not None and node.parent is not None:
            path.append(node.id)
            node = node.parent
        path.reverse()
        return path

    # ---- structure ----

    def _take_in(self, node_id: int, tokens: Tokens | None, space: Space) -> int:
        """Mirror what is new on the path to that node; returns its deepest node on the device.

        `tokens` None: what is new comes from the host tier, which is asked. KeyError when the core does not know the
        node, LookupError where the path contradicts the mirror.
        """
        table, root = self._table, self._root
        above, taken = root, False
        for known, _, start, end, on_device, _ in self.path_to(node_id):
            if on_device is None:
                break  # on the host only, as is all below it
            if known not in table:
                own = self._host_tokens(known) if tokens is None else tokens(start, end)
                if len(own) != end - start:
                    raise LookupError(f"node {known} of {end - start} tokens has {len(own)} known ones")
                packed = _pack(own)
                place = self._place(above, self._page(packed, end - start), space)
                behind = self._children.get(place)
                if behind is not None:
                    theirs = _unpack(self._keys[behind], table[behind].length)
                    if not np.array_equal(theirs[: len(own)], own):
                        raise LookupError(f"node {known} is no prefix of node {behind}")
                    self._cut_off(known, behind, end - start, self._clock - 1, self._clock - 1)
                else:
                    self._keys[known] = packed
                    self._children[place] = known
                    if above == root and space != _NO_SPACE:
                        self._spaces[known] = space
                    self.scout.grown(known, above, end - start, start, self._clock)
                taken = True
            above = known
        if taken and self._anchors:
            self._move_anchors()
        return above

    def _page(self, own: bytes, length: int) -> bytes:
        """The first page of a node with these tokens; the same whatever width the others need."""
        if len(own) == 4 * length:
            return own[: 4 * self._page_tokens]
        return _pack(_unpack(own, length)[: self._page_tokens])

    def _place(self, parent: int, page: bytes, space: Space) -> int:
        """Where a node is found: by its first page, below its parent; in the root's case also by its namespace.

        A hash is enough: whoever finds a node by it compares the tokens.
        """
        return hash((parent, page, space)) if parent == self._root else hash((parent, page))

    def _cut_off(self, prefix: int, suffix: int, at: int, prefix_stamp: float, suffix_stamp: float) -> None:
        """`suffix` lost its first `at` tokens to the new node `prefix`; LookupError when that cannot be."""
        record, own = self._table[suffix], self._keys[suffix]
        parent = record.parent
        if parent is None or not 0 < at < record.length:
            raise LookupError(f"node {prefix} of {at} tokens is no prefix of node {suffix}, which has {record.length}")
        space = self._spaces.pop(suffix, _NO_SPACE)
        if space != _NO_SPACE:
            self._spaces[prefix] = space
        self._children[self._place(parent.id, self._page(own, record.length), space)] = prefix
        bytes_in = at * (len(own) // record.length)
        self._keys[prefix], self._keys[suffix] = own[:bytes_in], own[bytes_in:]
        self._children[self._place(prefix, self._page(own[bytes_in:], record.length - at), space)] = suffix
        self.scout.split(prefix, suffix, at, prefix_stamp, suffix_stamp)

    def _gone(self, node_id: int) -> None:
        """The node has left the device."""
        if not self.scout.live:
            return
        try:
            record = self._table[node_id]
            assert record.parent is not None
            page = self._page(self._keys.pop(node_id), record.length)
            del self._children[self._place(record.parent.id, page, self._spaces.pop(node_id, _NO_SPACE))]
        except Exception:
            self.scout.fail("mirror")
        self.scout.removed(node_id)

    def _host_tokens(self, node_id: int) -> Ids:
        """A node's own tokens, as the host tier knows them."""
        spec = self.build_storage_backup_spec(node_id, False)
        if spec is None:
            raise LookupError(f"node {node_id} came to the device, from where nobody knows")
        return np.frombuffer(spec.token_ids, dtype=np.int64)

    # ---- locks ----

    def inc_lock_ref(self, node_id: int, skip_lock_components: Sequence[Any] = ()) -> Any:
        result = super().inc_lock_ref(node_id, skip_lock_components)
        if ComponentType.FULL not in skip_lock_components:
            self._lock(node_id)
        return result

    def dec_lock_ref(self, node_id: int, params: Any, skip_swa: bool = False) -> Any:
        result = super().dec_lock_ref(node_id, params, skip_swa)
        if ComponentType.FULL not in params.skipped_lock_components:
            self._unlock(node_id)
        return result

    def inc_full_pin(self, node_id: int) -> None:
        super().inc_full_pin(node_id)
        self._lock(node_id)

    def dec_full_pin(self, node_id: int) -> None:
        super().dec_full_pin(node_id)
        self._unlock(node_id)

    def _lock(self, node_id: int) -> None:
        if not self.scout.live:
            return
        anchor = self._anchors.get(node_id)
        if anchor is None and node_id not in self._table:
            try:
                anchor = self._anchors[node_id] = [self._deepest(node_id), 0]
            except Exception:
                self.scout.fail("mirror")
                return
        if anchor is None:
            self.scout.locked(node_id)
        else:
            anchor[1] += 1
            self.scout.locked(anchor[0])

    def _unlock(self, node_id: int) -> None:
        if not self.scout.live:
            return
        anchor = self._anchors.get(node_id)
        if anchor is None:
            self.scout.unlocked(node_id)
            return
        anchor[1] -= 1
        if anchor[1] == 0:
            del self._anchors[node_id]
        self.scout.unlocked(anchor[0])

    def _deepest(self, node_id: int) -> int:
        """The deepest node on the path that is on the device."""
        return next((known[0] for known in reversed(self.path_to(node_id)) if known[0] in self._table), self._root)

    def _move_anchors(self) -> None:
        """Locks that an ancestor held for want of the node itself go to the deepest that is there now."""
        for node_id, anchor in self._anchors.items():
            holder, times = self._deepest(node_id), anchor[1]
            if holder != anchor[0]:
                for _ in range(times):
                    self.scout.unlocked(anchor[0])
                    self.scout.locked(holder)
                anchor[0] = holder

    # ---- the host tier ----

    def insert_host(self, node_id: int, key: Any, *args: Any, **kwargs: Any) -> Any:
        result = super().insert_host(node_id, key, *args, **kwargs)
        if self.scout.live:
            try:
                self._look_below(node_id, key, result.inserted_host_node)
            except Exception:
                self.scout.fail("mirror")
        return result

    def _look_below(self, node_id: int, key: Any, made: int | None) -> None:
        """Something was put into the host tier below that node, along `key`: on the way a node of the device may have
        been split, even where nothing was made."""
        path, below = self.path_to(node_id), _tokens_of(key)
        base = path[-1][3] if path else 0
        if made is None:
            record = self._table.get(node_id)
            if record is None:
                return  # on the host only, as is all below it
            ids = self._key_to(record, record.length).token_ids if path else array("q")
            ids.extend(array("q", below(0, len(key)).tobytes()))
            _, made, _ = self.match_full_device_prefix(RadixKey(ids, key.extra_key, cache_salt=key.cache_salt))
        self._clock += 2
        if made not in self._table:
            self._take_in(made, lambda a, b: below(a - base, b - base), (key.extra_key, key.cache_salt))

    def build_load_back_spec(self, node_id: int, req: Any = None) -> Any:
        self._loading = None if req is None else req.rid
        return super().build_load_back_spec(node_id, req)

    def commit_load_back(self, node_id: int, *args: Any, **kwargs: Any) -> Any:
        actions = super().commit_load_back(node_id, *args, **kwargs)
        self.scout.counters["load_backs"] += 1
        if self.scout.live:
            self.scout.inserting = self._loading
            try:
                self._clock += 1
                self._take_in(node_id, None, self.prefetch_anchor_info(node_id))
            except Exception:
                self.scout.fail("mirror")
            finally:
                self.scout.inserting = self._loading = None
        return actions

    # ---- eviction ----

    def evict_device_start(self, component_type: Any, request_cnt: int) -> None:
        self._asked = request_cnt
        self._walking = self._is_sure() and self.scout.begin_walk()
        if not self._walking:
            self.scout.counters["core_calls"] += 1
            super().evict_device_start(component_type, request_cnt)

    def _is_sure(self) -> bool:
        """Whether the mirror holds what the core holds, as far as the core's own sums tell."""
        if not self.scout.live or self.has_ongoing_insert():
            return False
        wrong = self._wrong_sums()
        if wrong:
            self.scout.compare(lambda: wrong)
        return not wrong

    def _wrong_sums(self) -> list[str]:
        """A line where the evictable and protected tokens are not the core's."""
        table = self._table
        ours = (table.held - table.protected, table.protected)
        real = (self.full_evictable_size(), self.full_protected_size())
        return [] if ours == real else [f"evictable and protected tokens: tree {real}, mirror {ours}"]

    def evict_device_next_node(self, component_type: Any, tracker: Any) -> Any:
        if not self._walking:
            return super().evict_device_next_node(component_type, tracker)
        if tracker.get(component_type, 0) >= self._asked:
            return EvictDeviceNextNodeResult()
        scout = self.scout
        victim = scout.victim()
        if victim is not None and self._is_leaf(victim):
            return EvictDeviceNextNodeResult(node_id=victim, made_progress=True, cache_actions=self._trim(victim))
        if victim is not None or (scout.walking and self._table.held > self._table.protected):
            scout.mistaken(victim)
        if scout.walking:
            return EvictDeviceNextNodeResult()  # nothing is left
        self._walking = False
        scout.counters["rescued_calls"] += 1
        super().evict_device_start(component_type, self._asked)
        return super().evict_device_next_node(component_type, tracker)

    def _is_leaf(self, victim: int) -> bool:
        """Whether it is a leaf, and the core has it where the mirror has it: a wrong one would make the core panic."""
        record = self._table.get(victim)
        if record is None or not self._table.is_leaf(record):
            return False
        try:
            return self.tokens_of(victim) == record.length and not self.is_full_device_evicted(victim)
        except LookupError:
            return False

    def _there(self, node_id: int) -> tuple[Any, ...]:
        """Where the core has the node: parent, first token, end, tokens on the device."""
        return tuple(self.path_to(node_id)[-1][1:5])

    def _trim(self, victim: int) -> list[Any]:
        """Cut a victim that holds more than is needed; returns what SGLang has to do because of the split.

        The core has no call for it, but a match of a part of a leaf splits it there. The head is as old as the leaf.
        """
        keeps = self.enable_hicache and (self.is_write_back or self.is_backuped(victim))
        drop = self.scout.cut(victim, HOST_QUANTUM if keeps else 0)
        if drop is None:
            return []
        record = self._table[victim]
        at = record.length - drop
        try:
            key = self._key_to(record, at)
        except Exception:
            self.scout.fail("mirror")
            return []
        found = super().match_prefix(MatchPrefixParams(key=key))
        try:
            head = found.best_match_node
            if head in self._table or (self.tokens_of(head), self.tokens_of(victim)) != (at, drop):
                raise LookupError(f"node {victim} was not cut at {record.start + at}")
            self._cut_off(head, victim, at, record.stamp, record.stamp)
            self.scout.counters["trims"] += 1
        except Exception:
            self.scout.fail("mirror")
        return list(found.cache_actions)

    def _key_to(self, node: Node, at: int) -> Any:
        """The key from the root to `at` tokens into the node."""
        parts = [_unpack(self._keys[node.id], node.length)[:at]]
        top = node
        while top.parent is not None and top.parent.parent is not None:
            top = top.parent
            parts.append(_unpack(self._keys[top.id], top.length))
        ids = array("q", np.concatenate(parts[::-1]).tobytes())
        extra_key, cache_salt = self._spaces.get(top.id, _NO_SPACE)
        return RadixKey(ids, extra_key=extra_key, cache_salt=cache_salt)

    def evict_device_leaf(self, node_id: int, is_write_back: bool) -> Any:
        result = super().evict_device_leaf(node_id, is_write_back)
        if result.backup_kv is None:
            self._gone(node_id)
        return result

    def demote(self, node_id: int) -> Any:
        result = super().demote(node_id)
        self._gone(node_id)
        return result

    def drop_subtree_no_host(self, node_id: int) -> Any:
        result = super().drop_subtree_no_host(node_id)
        if result.is_dropped:
            self._gone(node_id)
        return result

    def evict_device_end(self, component_type: Any) -> None:
        if self._walking:
            self._walking = False
            self.scout.end_walk()
        else:
            super().evict_device_end(component_type)
        if self.scout.checks:
            self.scout.compare(self.differences)

    # ---- looking in ----

    def differences(self) -> list[str]:
        """Where the mirror is not the tree, a line for each, as far as the core can be asked; at O(nodes x depth)."""
        table, found = self._table, self._wrong_sums()
        for node in table:
            if node.parent is None:
                continue
            try:
                there = self._there(node.id)
            except LookupError:
                found.append(f"node {node.id} is not in the tree")
                continue
            if there != _here(node):
                found.append(f"node {node.id}: tree {there}, mirror {_here(node)}")
            if len(_unpack(self._keys.get(node.id, b""), node.length)) != node.length:
                found.append(f"node {node.id}: its tokens are not those known")
        if len(self._keys) != len(table) - 1 or len(self._children) != len(table) - 1:
            found.append(f"{len(table) - 1} nodes, {len(self._keys)} with tokens, {len(self._children)} in a place")
        return found


def _here(node: Node) -> tuple[Any, ...]:
    """Where the mirror has the node, as `Mirrored._there` says it."""
    return node.parent and node.parent.id, node.start, node.start + node.length, node.length


def _tokens_of(key: Any) -> Tokens:
    ids = np.frombuffer(key.raw_token_ids(), dtype=np.int64)
    return lambda start, stop: ids[start:stop]


def _pack(ids: Ids) -> bytes:
    return ids.astype(np.int32).tobytes() if ids.max() < _NARROW else ids.tobytes()


def _unpack(own: bytes, length: int) -> Ids:
    """The tokens of a node of that many; a part of what `_pack` made may need less than it takes."""
    if len(own) == 8 * length:
        return np.frombuffer(own, dtype=np.int64)
    return np.frombuffer(own, dtype=np.int32).astype(np.int64)
