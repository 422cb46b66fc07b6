"""Owners of texts. Whatever is learned from a text (drafts, beginnings of prompts, compiled
grammars)
is used only for requests of its owner, so that nobody can measure what another one wrote."""

from __future__ import annotations

import secrets
from hashlib import blake2b


class Owners:
    """Numbers of owners. An owner is an API key with the `cache_salt` of a request (vLLM's name).

    The numbers depend on a secret of this process, so that no client can choose or guess one.
    """

    def __init__(self, shared: bool = False) -> None:
        """
        Args:
            shared: All keys are one owner; a `cache_salt` still separates requests.
        """
        self.shared, self._secret = shared, secrets.token_bytes(32)

    def number(self, key: str, salt: str) -> int:
        """The number of an owner; 0 if there are neither keys nor a salt.

        Args:
            key: The API key of the request, or "".
            salt: Its `cache_salt`, or "".
        """
        key = "" if self.shared else key
        if not key and not salt:
            return 0
        digest = blake2b(key=self._secret, digest_size=8)
        for part in (key, salt):
            data = part.encode(errors="surrogatepass")
            digest.update(len(data).to_bytes(8, "little") + data)
        return int.from_bytes(digest.digest(), "little", signed=True) or 1
