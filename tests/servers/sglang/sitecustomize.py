"""Lets `import torchvision` succeed beside any build of torch; SGLang needs its pure-Python part only.

torchvision's wheel carries an extension linked against CUDA's libraries. Beside a CPU-only torch it cannot be loaded,
its operators stay undeclared, and the import then fails where torchvision attaches Python code to `torchvision::nms`.
Beside a CUDA torch it loads, on a machine without a GPU too, and declares them itself: declaring them twice would
abort the process. So: try the extension first, and declare the operators only where it does not load.

Python imports `sitecustomize` at every start, in SGLang's child processes too. torch itself is imported only when
torchvision is.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import pathlib
import sys


class DeclareTorchvisionOperators(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):  # type: ignore[no-untyped-def]
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            spec = importlib.machinery.PathFinder.find_spec(fullname, path)
            if spec is not None and spec.origin is not None and not extension_loads(pathlib.Path(spec.origin).parent):
                declare()


def extension_loads(package: pathlib.Path) -> bool:
    import torch

    try:
        for library in package.glob("_C*.so"):
            torch.ops.load_library(str(library))
            return True
    except OSError:
        pass
    return False


def declare() -> None:
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    torch._torchvision_operators = library  # the declarations last as long as this object does


sys.meta_path.insert(0, DeclareTorchvisionOperators())
