"""Compatibility of Avro schemas: Avro's rules of schema resolution. Pure."""

from __future__ import annotations

from typing import Final

from headwater.schema_registry.avro import Field, Node
from headwater.schema_registry.work_limit import WorkLimit

# Which other types a reader accepts.
_PROMOTED: Final = {
    "long": ("int",),
    "float": ("int", "long"),
    "double": ("int", "long", "float"),
    "string": ("bytes",),
    "bytes": ("string",),
}


def compare(reader: Node, writer: Node, work: WorkLimit) -> None:
    """Collect the reasons why the reader cannot read what the writer writes."""
    _Comparison(work).compare(reader, writer, "")


class _Comparison:
    """One comparison. Pairs that are being compared are assumed to fit, since records may contain themselves."""

    def __init__(self, work: WorkLimit, beside: _Comparison | None = None) -> None:
        self._work = work
        self._known: dict[tuple[int, int], bool] = {} if beside is None else beside._known
        # The known pairs that are assumed to fit, in the order in which they were found.
        self._fitting: list[tuple[int, int]] = [] if beside is None else beside._fitting

    def _fits(self, reader: Node, writer: Node) -> bool:
        """Whether it fits, without recording problems."""
        quiet = _SeparateLimit(self._work)
        _Comparison(quiet, self).compare(reader, writer, "")
        return not quiet.problems

    def compare(self, reader: Node, writer: Node, where: str) -> None:
        self._work.step()
        pair = (id(reader), id(writer))
        if pair in self._known:
            if not self._known[pair]:
                self._work.found(where, "does not fit")
            return
        self._known[pair] = True
        before = len(self._work.problems), len(self._fitting)
        self._fitting.append(pair)
        self._compare(reader, writer, where)
        if len(self._work.problems) > before[0]:
            # Pairs that were found to fit meanwhile may depend on this pair, which does not fit.
            for later in self._fitting[before[1] :]:
                del self._known[later]
            del self._fitting[before[1] :]
            self._known[pair] = False

    def _compare(self, reader: Node, writer: Node, where: str) -> None:
        if writer.kind == "union":
            for branch in writer.inner:
                if not self._fits(reader, branch):
                    self._work.found(where, f"{_describe(branch)} was written and {_describe(reader)} is read")
            return
        if reader.kind == "union":
            if not any(self._fits(branch, writer) for branch in reader.inner):
                self._work.found(where, f"{_describe(writer)} was written and is none of {_describe(reader)}")
            return
        if reader.kind != writer.kind:
            if writer.kind not in _PROMOTED.get(reader.kind, ()):
                self._work.found(where, f"{_describe(writer)} was written and {_describe(reader)} is read")
            return
        if reader.kind in ("record", "enum", "fixed") and not _same_name(reader, writer):
            self._work.found(where, f'"{writer.name}" was written and "{reader.name}" is read: give it as an alias')
            return
        if reader.kind == "fixed" and reader.size != writer.size:
            self._work.found(where, f"{writer.size} bytes were written and {reader.size} are read")
        elif reader.kind == "enum" and reader.default_symbol is None:
            if gone := sorted(set(writer.symbols) - set(reader.symbols)):
                self._work.found(where, f"symbols are gone and there is no default: {', '.join(gone[:10])}")
        elif reader.kind in ("array", "map"):
            self.compare(reader.inner[0], writer.inner[0], f"{where}[]")
        elif reader.kind == "record":
            self._compare_records(reader, writer, where)

    def _compare_records(self, reader: Node, writer: Node, where: str) -> None:
        written = {one.name: one for one in writer.fields}
        for wanted in reader.fields:
            inside = f"{where}.{wanted.name}" if where else wanted.name
            found = _written(wanted, written)
            if found is not None:
                self.compare(wanted.type, found.type, inside)
            elif not wanted.has_default:
                self._work.found(inside, "is read, was not written and has no default")


class _SeparateLimit(WorkLimit):
    """Shares the step count of another limit, but collects its own problems."""

    def __init__(self, work: WorkLimit) -> None:
        super().__init__()
        self._with = work

    def step(self) -> None:
        self._with.step()


def _written(wanted: Field, written: dict[str, Field]) -> Field | None:
    for name in (wanted.name, *sorted(wanted.aliases)):
        if name in written:
            return written[name]
    return None


def _same_name(reader: Node, writer: Node) -> bool:
    # As in other implementations, the namespace may differ: only the last part must be equal, or an alias.
    return (
        reader.name.rpartition(".")[2] == writer.name.rpartition(".")[2]
        or writer.name in reader.aliases
        or writer.name.rpartition(".")[2] in {alias.rpartition(".")[2] for alias in reader.aliases}
    )


def _describe(node: Node) -> str:
    if node.kind == "union":
        return f"[{', '.join(_describe(branch) for branch in node.inner[:10])}]"
    return f'{node.kind} "{node.name}"' if node.name else node.kind
