"""python -m fourfold.conformance.ranks ADAPTER: the host of one engine's cells."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path


def main(path: str) -> None:
    answers = os.dup(1)
    os.dup2(2, 1)  # what an engine prints must not come between answers
    found = importlib.util.spec_from_file_location(f"adapter_{Path(path).stem}", path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module
    found.loader.exec_module(module)
    # Torch comes with it: seconds, which an adapter that does not load need not wait for. Before
    # the engine, which may have changed it.
    from fourfold.conformance.ranks import host

    for name in module.ENGINE.modules:
        importlib.import_module(name)
    os.write(answers, b'{"end": "ready"}\n')
    host.serve(module.ENGINE, answers)


if __name__ == "__main__":
    main(sys.argv[1])
