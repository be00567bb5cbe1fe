"""Export of a finished network to a file, which is checked before it gets its name."""

from dcil.export.compact.layers import Cut
from dcil.export.compact.optimizer import carry_optimizer
from dcil.export.compact.shrink import Compact, compact
from dcil.export.formats import BLOCKS, DTYPES, FORMATS, PROGRAMS, check_options
from dcil.export.int8 import Change, export_int8
from dcil.export.plain import read_torch
from dcil.export.semi import SemiStructured, load_semi, read_semi, to_semi_structured
from dcil.export.sparse import load_sparse, read_sparse
from dcil.export.writer import Written, export
from dcil.runs.outputs import check_output as check_target

__all__ = [
    "BLOCKS",
    "DTYPES",
    "FORMATS",
    "PROGRAMS",
    "Change",
    "Compact",
    "Cut",
    "SemiStructured",
    "Written",
    "carry_optimizer",
    "check_options",
    "check_target",
    "compact",
    "export",
    "export_int8",
    "load_semi",
    "load_sparse",
    "read_semi",
    "read_sparse",
    "read_torch",
    "to_semi_structured",
]
