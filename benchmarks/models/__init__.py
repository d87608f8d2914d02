"""Whole models side by side: eager, torch.compile and ours; `python -m benchmarks.models --help`.

`specs` is the table of models, `builders` and `seedvr` make them, `columns` says what is compared, `measure`
measures one model, `results` keeps rows on disk, `tables` shows them. `peers` compares single ops with
Liger-Kernel and quack.
"""

import sys
from pathlib import Path

# `timing`, `bound` and the other benchmarks are modules of that folder: each also runs as a script.
_FOLDER = str(Path(__file__).parents[1])
if _FOLDER not in sys.path:
    sys.path.append(_FOLDER)
