"""Blocks of the KV cache that come from other engines to the folder of this one, for the feature `kv_tiers`."""
