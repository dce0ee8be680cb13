"""Tenants that share a store and see nothing of each other, each with a quota; one of them leaves.

python docs/examples/tenants.py [DIRECTORY]
"""

from __future__ import annotations

import secrets
import sys
import tempfile

import kvfs
from kvfs.pages.identity import salt_digest

LAYOUT = kvfs.PageLayout.kv(layers=2, kv_heads=2, head_dim=64, dtype="bfloat16", page_tokens=16)


def main(directory: str) -> None:
    salts = {name: secrets.token_hex(16) for name in ("blue", "green")}  # secrets: keep them as such
    quotas = {f"salt:{salt_digest(salt)}": kvfs.Quota(cap_bytes=8 << 20, ttl_seconds=86_400) for salt in salts.values()}
    tokens = list(range(160))
    with kvfs.open(directory, capacity="64MiB", quotas=quotas) as store:
        spaces = {name: store.namespace("my-model", LAYOUT, "9213176", salt) for name, salt in salts.items()}
        print("blue stores", spaces["blue"].put(tokens, bytes(10 * LAYOUT.page_bytes)).stored, "pages")
        print("blue finds", spaces["blue"].match(tokens).tokens, "tokens")
        print("green finds", spaces["green"].match(tokens).tokens, "tokens")
        print("blue leaves:", store.purge(salt=salts["blue"]).pages, "pages removed")
        print("blue finds", spaces["blue"].match(tokens).tokens, "tokens")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(f"{folder}/store")
