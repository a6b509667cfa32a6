"""Make the modules of messages in src/headwater/servers/grpc/generated from the files in proto.

python tools/protos.py           write them
python tools/protos.py --check   fail if they are not what would be written
"""

from __future__ import annotations

import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).parent.parent
PROTOS = ROOT / "proto"
FOLDER = ROOT / "src" / "headwater" / "servers" / "grpc" / "generated"
PACKAGE = '"""Messages and services, as modules: generated from the files in proto by tools/protos.py."""\n'


def made() -> dict[str, str]:
    """Every file of the package, by its name."""
    sources = sorted(PROTOS.rglob("*.proto"))
    found = {"__init__.py": PACKAGE}
    with tempfile.TemporaryDirectory() as folder:
        options = [
            f"-I{PROTOS}",
            f"-I{files('grpc_tools') / '_proto'}",
            f"--python_out={folder}",
            f"--pyi_out={folder}",
        ]
        if protoc.main(["protoc", *options, *map(str, sources)]) != 0:
            raise SystemExit("protoc refused the files in proto")
        for source in sources:
            name = source.relative_to(PROTOS)
            for kind in (".py", ".pyi"):
                text = Path(folder, name.with_name(f"{name.stem}_pb2{kind}")).read_text()
                # No file needs another, so that they can lie side by side.
                note = f'"""Generated from proto/{name.as_posix()} by tools/protos.py: change that."""\n'
                found[f"{name.stem}_pb2{kind}"] = note + text
    return found


def main() -> int:
    files_made = made()
    there = {path.name: path.read_text() for path in FOLDER.glob("*.py*")} if FOLDER.exists() else {}
    if there == files_made:
        return 0
    if "--check" in sys.argv:
        print("src/headwater/servers/grpc/generated is not what proto says; run: python tools/protos.py")
        return 1
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in there.keys() - files_made.keys():
        (FOLDER / name).unlink()
    for name, text in files_made.items():
        (FOLDER / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
