"""The engine-free core of sglang-scout: who is calling, who is called next, what a cached node is worth.

Nothing in this package imports SGLang or torch. An engine (or the simulator) is an adapter on two contracts:
`radix_policy.events` (what happens to requests) and `radix_policy.tree_view` (what happens to the radix tree).
Both end in one object, `radix_policy.runtime.Runtime`, whose four verbs are observe, score, predict and act.
"""
