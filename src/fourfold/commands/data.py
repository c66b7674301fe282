"""Token files, which 'bench', 'sweep' and 'train' read by --data: make one from text, look at one.

'data make' writes NAME.bin (little-endian uint16 or uint32 tokens) and NAME.json (what they are).
Every FILE is one document, followed by an end token; '-' is stdin. Without --tokenizer a token is a
byte and 256 ends a document. 'data show' reads the whole file and checks it against its checksum;
exit 1 when it differs.
"""

from __future__ import annotations

import argparse
from typing import Any

from fourfold.commands import flags
from fourfold.show.table import json_text, render
from fourfold.spec import codec
from fourfold.spec.tokens import TokenInfo, read_info, token_paths
from fourfold.units import show_bytes

EXAMPLES = """\
examples:
  fourfold data make --out corpus README.md docs/*.md
  fourfold data make --out corpus --tokenizer llama/tokenizer.json books/*.txt
  zcat dump.gz | fourfold data make --out dump -
  fourfold data show corpus
  fourfold bench --model llama-tiny --gpus 2 --seq-len 128 --global-batch 16 --data corpus
"""
_FIRST = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="{make,show}")
    make = actions.add_parser("make", help="texts -> a token file", allow_abbrev=False)
    make.add_argument("files", nargs="+", metavar="FILE", help="a text; - is stdin")
    make.add_argument("--out", required=True, metavar="NAME", help="for NAME.bin and NAME.json")
    make.add_argument(
        "--tokenizer", default="bytes", metavar="FILE",
        help="bytes (default), or a Hugging Face tokenizer.json",
    )  # fmt: skip
    make.add_argument("--vocab", type=int, metavar="N", help="the model's, which must suffice")
    make.add_argument(
        "--end-token", metavar="TEXT", help="of a tokenizer, after each document; or 'none'"
    )
    make.add_argument("--force", action="store_true", help="replace an existing NAME")
    flags.add_format(make)
    show = actions.add_parser("show", help="what a token file holds", allow_abbrev=False)
    show.add_argument("name", metavar="NAME", help="as given to 'data make --out'")
    show.add_argument("--quick", action="store_true", help="only look at both ends of the tokens")
    flags.add_format(show)


def run(args: argparse.Namespace) -> int:
    if args.action == "make":
        from fourfold.commands.data_make import run_make

        name = run_make(args)
        print(_text(_facts(name, read_info(name)), args.format))
        return 0
    info = read_info(args.name)
    facts = _facts(args.name, info)
    if not args.quick:
        facts |= _checked(args.name, info)
    print(_text(facts, args.format))
    return 1 if facts["checksum"] == "differs" else 0


def _facts(name: str, info: TokenInfo) -> dict[str, Any]:
    tokens, _ = token_paths(name)
    first = _first(name, info)
    facts = codec.encode(info) | {
        "tokens_file": str(tokens),
        "size_bytes": info.size_bytes,
        "checksum": "ends match",
        "first_tokens": first,
    }
    if info.tokenizer == "bytes":
        plain = bytes(token for token in first if token < 256)
        facts["first_text"] = plain.decode("utf-8", errors="replace")
    return facts


def _first(name: str, info: TokenInfo) -> list[int]:
    import numpy as np

    kind = np.dtype(info.dtype).newbyteorder("<")
    found = np.fromfile(token_paths(name)[0], dtype=kind, count=min(_FIRST, info.tokens))
    return [int(token) for token in found]


def _checked(name: str, info: TokenInfo) -> dict[str, Any]:
    """All tokens read once: hash, entropy and how many kinds there are."""
    from fourfold.commands.data_make import Meter
    from fourfold.spec.tokens import Tally, chunks

    tally, meter = Tally(info.dtype, info.vocab), Meter("read", info.size_bytes)
    path, _ = token_paths(name)
    for plain in chunks(path):
        tally.add(plain)
        meter.add(len(plain))
    meter.end()
    same = tally.sha256 == info.sha256 and tally.beyond == 0
    return {
        "checksum": "matches" if same else "differs",
        "found_sha256": tally.sha256,
        "distinct_tokens": tally.distinct,
        "unigram_nats": tally.entropy_nats,
    }


def _text(facts: dict[str, Any], style: str) -> str:
    if style == "json":
        return json_text(facts)
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
    return render(["quantity", "value", "note"], rows, style)


def _distinct(facts: dict[str, Any]) -> str:
    return f"{facts['distinct_tokens']:,} of them occur" if "distinct_tokens" in facts else ""
