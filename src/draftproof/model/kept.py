"""The former path of `draftproof.weights.disk_cache`: the same module under another name, so that
its settings can be changed here too."""

import sys

from draftproof.weights import disk_cache

sys.modules[__name__] = disk_cache
