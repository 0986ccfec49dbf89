"""Files of KV cache blocks: their format, the folders that have them and archives. `kv_tiers` reads and writes them."""
