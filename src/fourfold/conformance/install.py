"""Releases of other engines, each in a folder of its own: an environment that has the release and
what it needs, and takes torch from the interpreter that runs fourfold."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from fourfold import files
from fourfold.errors import MachineError, UserError, nearest
from fourfold.spec.engine import ADAPTERS, version_key
from fourfold.spec.words import OURS

# Files of a release for a newer Python are Python: what is compiled among them is not used here.
NEWER = ("3.12", "3.13", "3.14")
READY = ".ready"


@dataclass(frozen=True, slots=True)
class Release:
    """`source`: a folder to import the engine from in place of what was installed; `adapter`: a
    file that speaks to it in place of ours."""

    engine: str
    version: str
    python: str
    source: str = ""
    adapter: str = ""

    @property
    def name(self) -> str:
        return f"{self.engine} {self.version}".strip()

    @property
    def adapter_path(self) -> Path:
        if self.adapter:
            return Path(self.adapter)
        folder, adapter = ADAPTERS[self.engine]
        return Path(folder) / f"{adapter.file_of(self.version)}.py"


def engines_folder(given: str | None) -> Path:
    if given:
        return Path(given)
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "fourfold" / "engines"


def split_name(text: str) -> tuple[str, str]:
    """('megatron-core', '0.19.2') of 'megatron-core==0.19.2'; without a version ''."""
    engine, _, version = text.partition("==")
    if engine not in ADAPTERS:
        hint = nearest(engine, ADAPTERS)
        raise UserError("unknown engine", field="--engine", value=engine, hint=hint)
    if version and not re.fullmatch(r"[0-9][0-9A-Za-z.+!-]{0,40}", version):
        rule, hint = "has no version after ==", f"write {engine}==1.2.3"
        raise UserError(rule, field="--engine", value=text, hint=hint)
    return engine, version


def installed(folder: Path) -> list[Release]:
    """Whole ones, oldest version first."""
    found = []
    for ready in folder.glob(f"*/{READY}"):
        engine, _, version = files.read_own_text(ready).partition("==")
        if engine in ADAPTERS:
            found.append(Release(engine, version, str(ready.parent / "bin" / "python")))
    return sorted(found, key=lambda one: (one.engine, version_key(one.version)))


def find(text: str, folder: Path, source: str = "") -> Release:
    """An installed release by name; the newest where no version is given."""
    if text.endswith(".py"):
        if not Path(text).is_file():
            raise UserError("is no file", field="--engine", value=text, hint="pass an adapter")
        return Release(Path(text).stem, "", sys.executable, source, str(Path(text).absolute()))
    engine, version = split_name(text)
    if engine == OURS:
        return Release(OURS, metadata.version(OURS), sys.executable, source)
    matching = [o for o in installed(folder) if o.engine == engine and version in ("", o.version)]
    if not matching:
        hint = f"fourfold engines install {text}"
        raise UserError("is not installed", field="--engine", value=text, hint=hint)
    if source and not Path(source).is_dir():
        raise UserError("is no folder", field="--source", value=source, hint="pass a checkout")
    return replace(matching[-1], source=os.path.abspath(source) if source else "")


def install(text: str, folder: Path, say: Callable[[str], None]) -> Release:
    """From the package index that pip is set up for. A folder without its mark is made anew."""
    engine, version = split_name(text)
    if engine == OURS:
        raise UserError("is installed: it is this program", field="--engine", value=text)
    if version:
        for one in installed(folder):
            if (one.engine, one.version) == (engine, version):
                return one
    home = folder / f"{engine}-{version or 'newest'}"
    say(f"installing {text} into {home}")
    shutil.rmtree(home, ignore_errors=True)
    home.parent.mkdir(parents=True, exist_ok=True)
    _run([sys.executable, "-m", "venv", "--without-pip", str(home)], text)
    site = _site(home)
    ours = dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
    (site / "shared.pth").write_text("".join(f"{path}\n" for path in ours), encoding="utf-8")
    pins = home / "constraints.txt"
    pins.write_text(f"torch=={metadata.version('torch')}\n", encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    into = [*pip, "--python", str(home / "bin" / "python"), "install", "-q", "-c", str(pins)]
    # What our environment has counts as there, but for the engine itself.
    if not (_works([*into, text]) and _works([*into, "--no-deps", "--ignore-installed", text])):
        _any_python(pip, text, site)
    if imports := ADAPTERS[engine][1].imports:
        _run([*into, *imports], text)
    return _named(home, engine, folder, site)


def _any_python(pip: list[str], text: str, site: Path) -> None:
    """A release that asks for a newer Python than this one, as files."""
    for python in NEWER:
        command = [
            *pip,
            "install",
            "-q",
            "--target",
            str(site),
            "--no-deps",
            "--ignore-requires-python",
        ]
        if _works([*command, "--only-binary=:all:", "--python-version", python, text]):
            return
    rule = "cannot be installed from the package index that pip uses"
    hint = f"see what 'pip download --no-deps {text}' says"
    raise MachineError(rule, field="--engine", value=text, hint=hint)


def _named(home: Path, engine: str, folder: Path, site: Path) -> Release:
    """The folder is called by the version that came; its mark is written last."""
    found = [one for one in metadata.distributions(path=[str(site)]) if _same(one.name, engine)]
    if not found:
        raise MachineError("was installed, but pip left nothing", field="--engine", value=engine)
    version = found[0].version
    target = folder / f"{engine}-{version}"
    if target != home:
        shutil.rmtree(target, ignore_errors=True)
        home.rename(target)
    (target / READY).write_text(f"{engine}=={version}", encoding="utf-8")
    return Release(engine, version, str(target / "bin" / "python"))


def _same(name: str, engine: str) -> bool:
    return re.sub(r"[-_.]+", "-", name).lower() == engine


def _site(home: Path) -> Path:
    return Path(sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)}))


def _works(command: list[str]) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _run(command: list[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["no reason given"]
        raise MachineError(f"cannot be installed: {said[-1]}", field="--engine", value=what)
