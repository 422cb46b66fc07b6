"""Say which build of the kernels an installed draftproof loads; end with 1 if it has none.

    python recipes/packaging/check_installed.py

No compiler is used: the wheel must have brought the kernels.
"""

from __future__ import annotations

import os
import sys

os.environ["PATH"], os.environ["CC"] = "", "/nowhere/cc"

from draftproof.native import build  # noqa: E402

build.compiler = lambda: None
library = build.load()
print(f"{sys.platform} on {build.MACHINE}: {library.build or 'no kernels'} {library.reason}")
sys.exit(library.loaded is None)
