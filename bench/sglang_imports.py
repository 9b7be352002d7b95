"""Makes SGLang's connection classes importable without its GPU kernels; SGLang itself is unchanged.

Import it before anything of `sglang`, in the environment that `tools/bench-peers` makes. What the
classes never call on their way (kernels, image code, notebooks) is answered with empty modules.
"""

from __future__ import annotations

import asyncio
import importlib.abc
import importlib.machinery
import os
import sys
import types
import warnings
from collections.abc import Sequence
from unittest import mock

import uvloop

ABSENT = frozenset({"sgl_kernel", "torchvision", "IPython"})


class EmptyModule(types.ModuleType):
    """Has whatever one asks for, and none of it does anything."""

    __version__ = "0.0"

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock(name=name)


class EmptyModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds what nobody else found, if it is named in `ABSENT`."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return EmptyModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing in it."""


os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
warnings.simplefilter("ignore")
sys.meta_path.append(EmptyModules())
# SGLang's front process does the same, so its registry runs on uvloop there as here.
asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
