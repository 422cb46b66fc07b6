"""The former path of `draftproof.tokenizer.codec`, for programs that import it from here."""

from draftproof.tokenizer.codec import Codec, TextStream

__all__ = ["Codec", "TextStream"]
