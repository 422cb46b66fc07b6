"""The former path of `draftproof.cache.kv_cache`, for programs that import it from here."""

from draftproof.cache.kv_cache import KVCache

__all__ = ["KVCache"]
