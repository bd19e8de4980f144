"""Plain torch files of flash-linear-attention, loaded alone: its packages import triton."""

import importlib.util
from pathlib import Path
from types import ModuleType


def fla_naive(op: str) -> ModuleType:
    """The file naive.py of an op, such as 'gla' or 'generalized_delta_rule/dplr'."""
    package = importlib.util.find_spec("fla")
    assert package is not None
    assert package.submodule_search_locations is not None
    file = next(Path(place) / "ops" / op / "naive.py" for place in package.submodule_search_locations)
    spec = importlib.util.spec_from_file_location(f"fla_naive_{op.replace('/', '_')}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
