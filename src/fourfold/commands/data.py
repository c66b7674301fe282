"""Make and inspect token files, the --data of 'bench', 'sweep' and 'train'.

'data make' writes NAME.bin (little-endian uint16 or uint32 tokens) and NAME.json, its description.
Every FILE is one document, followed by an end token; '-' is stdin. Without --tokenizer a token is a
byte and 256 ends a document. 'data show' reads the whole file and verifies its checksum; it exits
with 1 if that differs.
"""

from __future__ import annotations

from typing import Any

import fourfold
from fourfold import options
from fourfold.commands import Command
from fourfold.options import option
from fourfold.output import Output, Stderr
from fourfold.show.table import Grid, Part
from fourfold.units import show_bytes

EXAMPLES = """\
examples:
  fourfold data make --out corpus README.md docs/*.md
  fourfold data make --out corpus --tokenizer llama/tokenizer.json books/*.txt
  zcat dump.gz | fourfold data make --out dump -
  fourfold data show corpus
  fourfold bench --model llama-tiny --gpus 2 --seq-len 128 --global-batch 16 --data corpus
"""


def make(args: Any) -> Output:
    given = options.given(args, "tokenizer", "vocab", "end_token", "force")
    answer = fourfold.make_tokens(args.files, args.out, **given, on_event=Stderr())
    return Output.of(answer, lambda: _page(answer.facts))


def show(args: Any) -> Output:
    answer = fourfold.show_tokens(args.name, quick=bool(args.quick), on_event=Stderr())
    status = 1 if answer.facts["checksum"] == "differs" else 0
    return Output.of(answer, lambda: _page(answer.facts), status=status)


ACTIONS = {
    "make": Command(
        "make",
        "Turn texts into a token file.",
        (
            option("files", "text files; - is stdin", "FILE", nargs="+"),
            option(
                "--out", "name of the token file: NAME.bin and NAME.json", "NAME", required=True
            ),
            option("--tokenizer", "bytes (default), or a Hugging Face tokenizer.json", "FILE"),
            option("--vocab", "vocabulary of the model, to check against", "N", read=int),
            option("--end-token", "token after each document, or 'none'", "TEXT"),
            option("--force", "overwrite an existing NAME", switch=True),
            options.FORMAT,
        ),
        make,
        line="make a token file from texts",
    ),
    "show": Command(
        "show",
        "Show and check a token file.",
        (
            option("name", "name given to 'data make --out'", "NAME"),
            option("--quick", "check only both ends of the file", switch=True),
            options.FORMAT,
        ),
        show,
        line="show and check a token file",
    ),
}


def _page(facts: dict[str, Any]) -> list[Part]:
    end = "none" if facts["end"] < 0 else str(facts["end"])
    checks = {
        "matches": "all tokens read",
        "ends match": "first and last MiB looked at",
        "differs": f"side file says {facts['sha256'][:16]}",
    }
    rows = [
        ["file", facts["tokens_file"], ""],
        ["tokens", f"{facts['tokens']:,}", f"{facts['dtype']}, {show_bytes(facts['size_bytes'])}"],
        ["documents", f"{facts['documents']:,}", f"end token: {end}"],
        ["tokenizer", facts["tokenizer"], ""],
        ["vocabulary", f"{facts['vocab']:,}", _distinct(facts)],
        ["unigram entropy", f"{facts['unigram_nats']:.4f} nats", "loss of frequencies alone"],
        ["checksum", facts["checksum"], checks[facts["checksum"]]],
        ["sha256", facts.get("found_sha256", facts["sha256"])[:16], ""],
        ["first tokens", " ".join(map(str, facts["first_tokens"][:12])), ""],
    ]
    if "first_text" in facts:
        rows.append(["as text", ascii(facts["first_text"])[1:-1][:60], ""])
    return [Grid(["quantity", "value", "note"], rows)]


def _distinct(facts: dict[str, Any]) -> str:
    return f"{facts['distinct_tokens']:,} of them occur" if "distinct_tokens" in facts else ""
