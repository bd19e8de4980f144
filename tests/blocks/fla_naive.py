"""Plain torch files of flash-linear-attention, loaded alone: its packages import triton."""

import importlib.util
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from unittest import mock


def fla_naive(op: str, unused: Mapping[str, str] | None = None) -> ModuleType:
    """The file naive.py of an op, such as 'gla' or 'generalized_delta_rule/dplr'.

    `unused` are names that it imports, by module, and that none of the functions to be called needs: they are left
    empty, as their modules need triton.
    """
    package = importlib.util.find_spec("fla")
    assert package is not None
    assert package.submodule_search_locations is not None
    file = next(Path(place) / "ops" / op / "naive.py" for place in package.submodule_search_locations)
    spec = importlib.util.spec_from_file_location(f"fla_naive_{op.replace('/', '_')}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    absent = {name: ModuleType(name) for name in ("fla", "fla.ops", *(unused or {}))} if unused else {}
    for name, attribute in (unused or {}).items():
        setattr(absent[name], attribute, None)
    with mock.patch.dict(sys.modules, absent), warnings.catch_warnings():
        # It warns that flash-attn, which it does not need either, is missing.
        warnings.filterwarnings("ignore", category=ImportWarning)
        spec.loader.exec_module(module)
    return module
