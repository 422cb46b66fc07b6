"""First contact with an Intel Gaudi: recipes/gpu/first_contact.py on `hpu`.

    python recipes/gaudi/first_contact.py --model org/model [--minutes 10] [--quick] [--device cpu]

Run it in Intel's PyTorch container. Lazy mode is chosen (PT_HPU_LAZY_MODE=1), and compiled graphs
are kept between calls in first-contact/recipes, since most of the time goes into compiling: call it
again, and what was compiled is there. float64 is not tried, for the device has none.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu"))

import first_contact

if __name__ == "__main__":
    os.environ.setdefault("PT_HPU_LAZY_MODE", "1")
    os.environ.setdefault("PT_HPU_RECIPE_CACHE_CONFIG", "first-contact/recipes,false,8192")
    first_contact.main(device="hpu")
