"""Make a bare checkout importable.

The distribution installs ``templates/`` and ``tuning_db/`` as ``tpf_jit.templates`` and ``tpf_jit.tuning_db``. In a
source checkout they lie beside ``tpf_jit/``, where Python would not look, so code that runs from the checkout (tests,
examples, ``python -m tpf_jit.cli``) needs a finder for those two names. In an installed package this does nothing.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path

_MAPPED = ("templates", "tuning_db")


class CheckoutFinder:
    """A meta path finder that knows the mapped folders of one checkout and nothing else."""

    def __init__(self, root: Path, package: str) -> None:
        self._folders = {f"{package}.{name}": root / name for name in _MAPPED}

    def find_spec(self, fullname: str, path=None, target=None) -> ModuleSpec | None:
        folder = self._folders.get(fullname)
        if folder is None or not (folder / "__init__.py").is_file():
            return None
        return spec_from_file_location(fullname, folder / "__init__.py", submodule_search_locations=[str(folder)])


def install(package_folder: Path | None = None) -> bool:
    """Put the finder on ``sys.meta_path`` when `package_folder` lies in a checkout; says whether it did."""
    folder = package_folder or Path(__file__).resolve().parent
    root = folder.parent
    if (folder / "templates").exists() or not (root / "pyproject.toml").is_file():
        return False
    if not (root / "templates" / "__init__.py").is_file():
        return False
    if not any(isinstance(finder, CheckoutFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, CheckoutFinder(root, __package__))
    return True
