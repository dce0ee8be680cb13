"""SGLang: kvfs as the storage of its hierarchical cache, or as the external linker of its radix tree.

``hicache`` and ``linker`` hold the classes that SGLang loads by name. What they do is in the other modules, which do
not import SGLang. See docs/sglang.md.
"""
