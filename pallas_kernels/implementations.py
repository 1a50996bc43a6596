"""The implementations of an op: which one runs a call, and why not a faster one.

A kernel module offers `supports(spec, platform, *, interpret=False) -> str | None`, the
reason why it cannot run a call or None, and a function named like the op. It is
imported when it is asked for, so everything imports on a CPU.
"""

import dataclasses
import importlib
import types
from collections.abc import Mapping
from typing import Any, NamedTuple

from pallas_kernels import device

REFERENCE = "reference"


class Choice(NamedTuple):
    """The implementation that runs a call, and why it is not a faster one."""

    name: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Implementations:
    """The table of one op, in order of preference.

    Attributes:
      op: name of the op, in messages.
      modules: name of each implementation to its module. Those in `optional` run only
        when they are named.
      optional: names that None and "auto" pass over.
    """

    op: str
    modules: Mapping[str, str]
    optional: tuple[str, ...] = ()

    def choose(self, spec: Any, impl: str | None = None) -> Choice:
        """Pick the implementation for a call; None or "auto" always finds one.

        Raises ValueError for an unknown name, NotImplementedError for a named
        implementation that does not support the call.
        """
        self.check(impl)
        if impl == REFERENCE:
            return Choice(REFERENCE, "")
        platform = device.platform()
        if impl is not None and impl in self.modules:
            reason = self.module(impl).supports(spec, platform, interpret=True)
            if reason is not None:
                raise NotImplementedError(f"impl={impl!r} does not run here: {reason}")
            return Choice(impl, "")
        refusals = []
        for name in self.modules:
            if name == REFERENCE or name in self.optional:
                continue
            reason = self.module(name).supports(spec, platform, interpret=False)
            if reason is None:
                return Choice(name, "")
            refusals.append(f"{name} {reason}")
        return Choice(REFERENCE, "; ".join(refusals))

    def check(self, impl: str | None) -> None:
        """Raise ValueError unless `impl` is a name of the table, None or "auto"."""
        if impl not in (None, "auto", *self.modules):
            allowed = ", ".join(["auto", *self.modules])
            raise ValueError(f"impl is {impl!r}; allowed: {allowed}")

    def nearest(self, impl: str | None) -> str | None:
        """Return `impl` where this op has it, else None: another op's choice."""
        return impl if impl in self.modules else None

    def explain(self, spec: Any, impl: str | None = None) -> str:
        """Return one line: which implementation runs, and why no faster one does."""
        choice = self.choose(spec, impl)
        because = f" ({choice.reason})" if choice.reason else ""
        return f"{self.op} runs impl={choice.name}{because}"

    def module(self, name: str) -> types.ModuleType:
        """Import and return the module of an implementation."""
        return importlib.import_module(self.modules[name])
