"""Runs in the environment of nanotron 0.4: what does it make of an exported YAML file?

The release does not import as published: nanotron/logging.py and nanotron/config/config.py import
each other ("cannot import name 'LoggingArgs' from partially initialized module"). The name serves
there as an annotation only, so that one import is put off until both are loaded. Its Llama does not
import without flash-attn, which has no build for a CPU: blocks and their costs are read from its
source, and the rule that gives blocks to stages is its own build_model.

Reads a JSON list of cases ({"config": path, "world": N}) from standard input.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import logging
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

warnings.filterwarnings("ignore")
_LATE = b"from nanotron.config.config import LoggingArgs\n"


class _PutOff(importlib.machinery.SourceFileLoader):
    """Loads nanotron.logging without the import that closes the circle."""

    def get_code(self, fullname: str) -> Any:
        source = Path(self.get_filename(fullname)).read_bytes()
        assert _LATE in source, "the release has changed"
        return self.source_to_code(source.replace(_LATE, b"LoggingArgs = None\n"), self.path)


class _Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> Any:
        spec = super().find_spec(fullname, path, target)
        if fullname == "nanotron.logging" and spec and spec.origin:
            return importlib.util.spec_from_loader(fullname, _PutOff(fullname, spec.origin))
        return spec


sys.meta_path.insert(0, _Finder)

import nanotron.logging  # noqa: E402
import torch  # noqa: E402
from nanotron.config import LlamaConfig, get_config_from_file  # noqa: E402
from nanotron.config.config import LoggingArgs  # noqa: E402

nanotron.logging.LoggingArgs = LoggingArgs  # pyrefly: ignore
logging.disable(logging.CRITICAL)

from nanotron import helpers  # noqa: E402
from nanotron.models import base  # noqa: E402
from telling import tell  # noqa: E402

helpers.log_rank = lambda *_, **__: None  # says so to rank 0 of processes; there are none

SOURCE = Path(base.__file__).with_name("llama.py").read_text()


def function(name: str) -> ast.FunctionDef:
    tree = ast.parse(SOURCE)
    return next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == name)


def block_costs(config: LlamaConfig) -> dict[str, float]:
    """LlamaModel.get_block_compute_costs, with names in place of classes that need flash-attn."""
    names = {name: name for name in ("LlamaDecoderLayer", "TensorParallelColumnLinear")}
    scope: dict[str, Any] = dict(names)
    exec(compile(ast.Module([function("get_block_compute_costs")], []), "llama.py", "exec"), scope)
    return scope["get_block_compute_costs"](SimpleNamespace(config=config))


class Block(base.PipelineBlock):
    """A pipeline block that only remembers its stage."""

    def __init__(self, builder: str) -> None:
        torch.nn.Module.__init__(self)
        self.module_builder = builder  # pyrefly: ignore

    def build_and_set_rank(self, pp_rank: int) -> None:
        self.stage = pp_rank  # pyrefly: ignore


class Blocks(torch.nn.Module):
    """The blocks of its Llama in their order: embedding, layers, norm, head, cast, loss."""

    def __init__(self, config: LlamaConfig, costs: dict[str, float]) -> None:
        super().__init__()
        names = ["Embedding", *["LlamaDecoderLayer"] * config.num_hidden_layers, "Norm"]
        names += ["TensorParallelColumnLinear", "Cast", "Loss"]
        self.blocks = torch.nn.ModuleList([Block(name) for name in names])
        self.costs = costs

    def get_block_compute_costs(self) -> dict[str, float]:
        return self.costs


def stages(config: LlamaConfig, pp: int) -> list[int]:
    costs = block_costs(config)
    context = SimpleNamespace(pp_pg=SimpleNamespace(size=lambda: pp), world_pg=None)
    base.log_rank = lambda *_, **__: None  # pyrefly: ignore
    model = base.build_model(lambda: Blocks(config, costs), context, torch.float, None, "cpu")  # pyrefly: ignore
    found = [0] * pp
    for block in model.blocks:
        found[block.stage] += block.module_builder == "LlamaDecoderLayer"
    return found


def parameters(model: LlamaConfig, tp: int, multiple: int) -> int:
    """The arithmetic of its fields: what its Llama allocates, padded vocabulary included."""
    vocab = helpers._vocab_size_with_padding(model.vocab_size, tp, multiple)
    head = model.hidden_size // model.num_attention_heads
    kv = head * int(model.num_key_value_heads or 0)
    layer = model.hidden_size * (2 * model.hidden_size + 2 * kv + 3 * model.intermediate_size + 2)
    ends = vocab * model.hidden_size * (1 if model.tie_word_embeddings else 2) + model.hidden_size
    return model.num_hidden_layers * layer + ends


def answer(case: dict) -> dict[str, Any]:
    config = get_config_from_file(case["config"])
    model, parallel, tokens = config.model.model_config, config.parallelism, config.tokens
    assert isinstance(model, LlamaConfig), type(model)
    assert parallel.dp * parallel.pp * parallel.tp == case["world"]
    assert model.num_attention_heads % parallel.tp == 0
    assert int(model.num_key_value_heads or 0) % parallel.tp == 0
    return {
        "layers": stages(model, parallel.pp),
        "params": parameters(model, parallel.tp, config.model.make_vocab_size_divisible_by),
        "tokens": config.global_batch_size * tokens.sequence_length,
        "micro_batches": tokens.batch_accumulation_per_replica,
        "overlap_tp": parallel.tp_linear_async_communication,
    }


if __name__ == "__main__":
    tell(answer)
