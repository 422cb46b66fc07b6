"""The former path of `draftproof.weights.disk_cache`: the same module, so its settings can also be
changed here."""

import sys

from draftproof.weights import disk_cache

sys.modules[__name__] = disk_cache
