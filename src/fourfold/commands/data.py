"""Make and inspect token files, the --data of 'bench', 'sweep' and 'train'.

'data make' writes NAME.bin (little-endian uint16 or uint32 tokens) and NAME.json, its description.
Every FILE is one document, followed by an end token; of .jsonl and .parquet files every row is, by
its field 'text' (--text-field). '-' is stdin. Without --tokenizer a token is a byte and 256 ends a
document. 'data show' reads the whole file and verifies its checksum; it exits
with 1 if that differs.
"""

from __future__ import annotations

from typing import Any

import fourfold
from fourfold import options
from fourfold.commands import Command
from fourfold.events import OnEvent
from fourfold.options import option
from fourfold.output import Output
from fourfold.show.table import Part, quantities
from fourfold.units import show_bytes
from fourfold.verbs.requests import TokensRequest

EXAMPLES = """\
examples:
  fourfold data make --out corpus README.md docs/*.md
  fourfold data make --out corpus --tokenizer llama/tokenizer.json books/*.txt
  fourfold data make --out web --tokenizer tokenizer.json shard-*.jsonl shard-*.parquet
  zcat dump.gz | fourfold data make --out dump -
  fourfold data show corpus
  fourfold bench --model llama-tiny --gpus 2 --seq-len 128 --global-batch 16 --data corpus
"""


def make(args: Any, show: OnEvent) -> Output:
    answer = fourfold.make_tokens(options.load(TokensRequest, args), on_event=show)
    return Output.of(answer, lambda: _page(answer))


def show_file(args: Any, show: OnEvent) -> Output:
    answer = fourfold.show_tokens(args.name, quick=bool(args.quick), on_event=show)
    return Output.of(answer, lambda: _page(answer), status=int(answer.checksum == "differs"))


ACTIONS = {
    "make": Command(
        "make",
        "Turn texts into a token file.",
        (*options.of(TokensRequest), options.FORMAT),
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
        show_file,
        line="show and check a token file",
    ),
}


def _page(answer: Any) -> list[Part]:
    info, distinct = answer.info, answer.distinct_tokens
    checks = {
        "matches": "all tokens read",
        "ends match": "first and last MiB looked at",
        "differs": f"side file says {info.sha256[:16]}",
    }
    end = "none" if info.end < 0 else info.end
    rows = [
        ["file", answer.tokens_file, ""],
        ["tokens", f"{info.tokens:,}", f"{info.dtype}, {show_bytes(info.size_bytes)}"],
        ["documents", f"{info.documents:,}", f"end token: {end}"],
        ["tokenizer", info.tokenizer, ""],
        ["vocabulary", f"{info.vocab:,}", f"{distinct:,} of them occur" if distinct else ""],
        ["unigram entropy", f"{answer.unigram_nats:.4f} nats", "loss of frequencies alone"],
        ["checksum", answer.checksum, checks[answer.checksum]],
        ["sha256", (answer.found_sha256 or info.sha256)[:16], ""],
        ["first tokens", " ".join(map(str, answer.first_tokens[:12])), ""],
    ]
    if answer.first_text is not None:
        rows.append(["as text", ascii(answer.first_text)[1:-1][:60], ""])
    return [quantities(rows)]
