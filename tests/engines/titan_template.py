"""The shipped template of torchtitan 0.2, to be run on CPUs in an environment of that release."""

from __future__ import annotations

import shlex
from pathlib import Path

from fourfold.verbs.engines import engine_template
from tests.engines.sampled import environment

NAME = "torchtitan-0.2"


def template(folder: Path) -> str:
    """With a torchrun of the engine's environment that starts it on the CPU."""
    shipped = engine_template(NAME)
    runner, entry = folder / "torchrun", Path(__file__).with_name("titan_cpu.py")
    runner.write_text(
        "#!/bin/bash\nargs=()\n"
        f'for word in "$@"; do [ "$word" = torchtitan.train ] && word={shlex.quote(str(entry))}; '
        '[ "$word" = -m ] || args+=("$word"); done\n'
        f'exec {shlex.quote(str(environment(NAME)))} -m torch.distributed.run "${{args[@]}}"\n'
    )
    runner.chmod(0o755)
    path = folder / f"{NAME}.toml"
    path.write_text(
        f'export = "{shipped.export}"\nreader = "{shipped.reader}"\n'
        f"command = {list(shipped.command)!r}\n[env]\nTORCHRUN = {str(runner)!r}\n"
        'OMP_NUM_THREADS = "1"\n'
    )
    return str(path)
