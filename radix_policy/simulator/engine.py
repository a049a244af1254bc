"""One engine without a model: the memory of SGLang and the life of a request, on a `SimTree` and a `Runtime`.

A request is admitted when its memory is there (`admit`: look up, lock the prefix, then per prefill chunk make room,
allocate, insert), grows while it decodes (`grow`), and leaves (`finish`: its output is inserted, split off
at the prompt's last page, everything is unlocked). This follows `PrefillAdder.add_one_req`, `alloc_for_extend`,
`alloc_for_decode`, `checkpoint_into_tree` and `release_kv_cache` of sglang 0.5.23, with outputs of known length
(`ignore_eos`, so admission reserves them whole) and nothing retracted.

The seam for a host tier: `admit` looks up what is on the device only (`SimTree.match`), and `_make_room` is the one
place where a victim is dropped; a tier would add to the look-up what it can restore and take over in `_make_room`.
"""

from collections.abc import Sequence

from radix_policy.events import PrefixMatched, RequestArrived, RequestFinished, Tag
from radix_policy.prompts import SpanPrompt, Spans
from radix_policy.runtime import Runtime
from radix_policy.simulator.tree import Cursor, SimTree, path_ids

CHUNK = 8192  # tokens; SGLang's --chunked-prefill-size on a GPU with 60 to 90 GB


class OutOfMemory(RuntimeError):
    """The engine ran out of KV memory although admission said that it would not: a bug here, not in the input."""


class Run:
    """One request in the engine."""

    __slots__ = (
        "allocated",
        "asked",
        "at",
        "cached",
        "kv",
        "matched",
        "number",
        "output",
        "private",
        "prompt",
        "rid",
        "spans",
        "started",
    )

    def __init__(self, rid: str, prompt: Spans, output: Spans, prompt_tokens: int, output_tokens: int) -> None:
        self.rid = rid
        self.asked = SpanPrompt(prompt)
        self.spans = prompt + output
        self.prompt = prompt_tokens
        self.output = output_tokens
        self.kv = prompt_tokens + output_tokens - 1  # tokens with KV in the end: the last output token gets none
        self.allocated = 0  # tokens with KV so far
        self.private = 0  # tokens in pages that the tree does not own
        self.cached = 0  # prompt tokens found in the tree
        self.matched = False
        self.number = 0  # of the call, for the loop
        self.at = Cursor(None, 0, 0, 0)  # type: ignore[arg-type]  # the locked node and the place where it ends
        self.started = 0.0  # when decoding began, for the loop


class Engine:
    """KV memory of `capacity` tokens (cut down to whole pages) under one runtime."""

    def __init__(
        self, runtime: Runtime, capacity: int, page_size: int = 1, chunk: int = CHUNK, trims: bool | None = None
    ) -> None:
        """`chunk`: tokens per prefill chunk, 0 for no limit. `trims` overrides what the policy says of itself."""
        self.runtime = runtime
        self.tree = SimTree(runtime, page_size)
        self.page = page_size
        self.capacity = capacity - capacity % page_size
        self.chunk = chunk - chunk % page_size if chunk >= page_size else 0
        if trims is not None:
            runtime.policy.trims = trims
        self.private = 0  # tokens in pages that running requests own
        self.running: dict[str, Run] = {}
        self.promised = 0  # output tokens that running requests may still write
        self.evictions = 0  # eviction calls
        self.evicted = 0  # tokens dropped

    @property
    def free(self) -> int:
        """Tokens that nobody owns."""
        return self.capacity - self.tree.used - self.private

    @property
    def locked(self) -> int:
        """Tokens that no policy can take: paths of running requests and what they hold beside the tree."""
        return self.tree.protected + self.private

    def fits(self, run: Run) -> bool:
        """Whether an empty engine could admit the request."""
        return run.prompt + run.output + self.page < self.capacity

    def arrive(self, run: Run, tag: Tag | None = None, namespace: str = "", priority: int = 0) -> None:
        """The request enters the waiting queue."""
        self.runtime.observe(RequestArrived(run.rid, run.asked, namespace, tag, priority))

    def touch(self, run: Run) -> None:
        """SGLang's refresh of a waiting request's prefix (it looks the whole prompt up)."""
        self.tree.match(run.spans, run.prompt)

    def admit(self, run: Run) -> bool:
        """Start the request when memory allows: look up, lock, prefill, insert. False leaves it waiting."""
        tree, page = self.tree, self.page
        at = tree.match(run.spans, run.prompt - 1)
        if not run.matched:
            run.matched = True
            self.runtime.observe(PrefixMatched(run.rid, path_ids(at.node), at.tokens))
        miss = run.prompt - at.tokens
        tree.lock(at.node)
        room = self.capacity - tree.protected - self.private - self.promised
        if miss + run.output + page >= room:
            tree.unlock(at.node)
            return False
        run.cached = run.allocated = at.tokens
        run.at = at
        self.running[run.rid] = run
        self.promised += run.output - 1
        inserted = 0
        while run.allocated < run.prompt:
            end = run.prompt
            if self.chunk and run.allocated + self.chunk < end:
                end = run.allocated + self.chunk
            self._extend(run, end)
            inserted = self._insert(run, end, inserted)
        return True

    def grow(self, steps: Sequence[tuple[Run, int]]) -> None:
        """Decode: each request gets KV for its number of further tokens, one of each per step, room made as needed.

        Many steps are taken at once: the victims are those of single steps, as long as no score changes in between.
        """
        page = self.page
        need = extra = 0
        for run, n in steps:
            have = run.allocated
            run.allocated = have + n
            self.promised -= n
            if page == 1:
                run.private += n
                need += n
            else:
                before = (have + page - 1) // page
                pages = (have + n + page - 1) // page - before
                run.private += pages * page
                need += pages * page
                # before each step SGLang wants a free page for every request, whether it needs one or not
                extra += ((have + n - 1 + page - 1) // page - before + 1 - pages) * page
        if need + extra > self.free:
            self._make_room(need + extra)
            if need > self.free:
                raise OutOfMemory(f"decoding needs {need} tokens, {self.free} are free")
        self.private += need

    def settle(self, run: Run) -> None:
        """Give the request the rest of its KV."""
        if run.allocated < run.kv:
            self.grow(((run, run.kv - run.allocated),))

    def finish(self, run: Run) -> None:
        """The request leaves: its output goes into the tree, split off at the prompt's last whole page."""
        tree, page = self.tree, self.page
        self.settle(run)
        prompt = run.prompt - run.prompt % page
        kv = run.kv - run.kv % page
        held = run.at.node
        split_off = 0 < prompt < kv
        at = tree.insert(run.spans, kv, run.at, prompt, run.rid, again=split_off)
        if split_off:
            tree.insert(run.spans, prompt, run.at, prompt, run.rid)
        self.private -= run.private
        run.private = 0
        # SGLang moves the lock to the output's node and then drops it; nothing can happen in between
        tree.unlock(held)
        run.at = at
        del self.running[run.rid]
        self.runtime.observe(RequestFinished(run.rid, run.output))

    # ---- inside ----

    def _extend(self, run: Run, end: int) -> None:
        """Allocate the prompt's KV up to `end`."""
        page = self.page
        begin = run.allocated
        pages = (end + page - 1) // page - (begin + page - 1) // page
        # with pages, SGLang asks for one more than it may need
        want = end - begin if page == 1 else end - begin + page
        if want > self.free:
            self._make_room(want)
            if pages * page > self.free:
                raise OutOfMemory(f"{run.rid}: prefill needs {pages * page} tokens, {self.free} are free")
        self.private += pages * page
        run.private += pages * page
        run.allocated = end

    def _insert(self, run: Run, end: int, inserted: int) -> int:
        """Hand the prompt's whole pages up to `end` to the tree and move the lock there; returns their end."""
        tree, page = self.tree, self.page
        old = run.at.node
        at = tree.insert(run.spans, end, run.at, inserted, run.rid)
        rest = end - at.tokens
        keep = (rest + page - 1) // page * page
        self.private += keep - run.private
        run.private = keep
        if at.node is not old:
            tree.lock(at.node)
            tree.unlock(old)
        run.at = at
        return at.tokens

    def _make_room(self, need: int) -> None:
        """Evict until `need` tokens are free or nothing can go any more."""
        tree, page, policy = self.tree, self.page, self.runtime.policy
        short = need - self.free
        if short <= 0:
            return
        self.evictions += 1
        before = tree.used
        with self.runtime.evicting() as drain:
            while short > 0:
                node = drain.next()
                if node is None:
                    break
                drop = policy.cut(node, short, page)
                short -= tree.trim(node.id, node.length - drop) if drop < node.length else tree.evict(node.id)
        self.evicted += before - tree.used
