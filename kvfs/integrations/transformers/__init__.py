"""transformers: keep the KV cache of prompts in a store, across processes.

::

    with kvfs.open("/var/cache/kv", capacity="50GiB") as store:
        cache = namespace_for(store, model)
        done = generate(model, cache, input_ids, max_new_tokens=100)
        done.output, done.restored            # what model.generate returns; prompt tokens not computed again

or in three steps, with the cache that ``model.generate`` fills in between::

    past, n = cache.load(input_ids)
    sequences = model.generate(input_ids, past_key_values=past, max_new_tokens=100)
    cache.save(sequences, past)

Greedy search and sampling, one prompt or a left-padded batch, full and sliding-window attention. An
unsupported model raises UnsupportedModelError; an unsupported cache is not saved (``PutResult.reason``).
"""

from kvfs.integrations.transformers.cache import PrefixCache, namespace_for
from kvfs.integrations.transformers.generation import Generated, generate
from kvfs.integrations.transformers.model import weights_digest

__all__ = ["Generated", "PrefixCache", "generate", "namespace_for", "weights_digest"]
