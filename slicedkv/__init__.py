"""slicedkv: contiguous virtual KV cache with on-demand physical pages."""
